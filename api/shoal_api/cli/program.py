"""A program on the command line as a job spec: `shoal submit train.py --workers 2:8 -- --lr 3e-4`, without YAML.

    train.py ARGUMENTS                          a script
    -m package.train ARGUMENTS                  a module
    python | torchrun | accelerate launch |
    deepspeed ...                               the command line that the user has: its launcher's options are read

Hides which options of which launcher mean what: numbers of processes become workers, what only brings processes
together is noted as not needed, and every other option is refused by name. Opens no file but the configuration of
accelerate.

accelerate's configuration file as what Shoal makes of it: workers, and variables of the script.

    num_processes                                   workers
    mixed_precision, use_cpu, dynamo_config ...     variables, as `accelerate launch` sets them
    fsdp_config                                     variables FSDP_..., if distributed_type is FSDP
    machine_rank, main_process_ip, gpu_ids ...      left out: Shoal brings the processes together itself
    deepspeed_config, fp8_config, SageMaker ...     refused by name

Hides the keys and which variable each becomes. Opens no other file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from shoal_api.cli.errors import CliError, ExitCode
from shoal_workers.contract import Launcher, is_job_name

_EXAMPLE = "for example: shoal submit train.py --workers 2:8 -- --lr 3e-4"
_MAX_NAME = 63


@dataclass(frozen=True, slots=True)
class Program:
    """What is run, as one process of each worker."""

    file: Path | None = None
    """The script, as the user has named it; None if a module is run."""
    module: str | None = None
    args: tuple[str, ...] = ()
    launcher: Launcher = Launcher.TORCHRUN
    workers: tuple[int, int] | None = None
    """The least and the most workers, by the options of the launcher; None if they do not say."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that options of the launcher stand for."""
    not_needed: tuple[str, ...] = ()
    """Options of the launcher that are left out, because Shoal brings the processes together itself."""
    config_file: Path | None = None
    """The configuration file of the launcher that was read."""


def read_program(command_line: Sequence[str], module: str | None = None) -> Program | None:
    """Read the arguments of `shoal submit`. Returns None if they name a job spec.

    Raises:
        CliError: the command line is not one that Shoal can start; the message names the way out.
    """
    if module is not None:
        return Program(module=module, args=tuple(command_line))
    if not command_line:
        raise CliError("which job? shoal submit SPEC, or shoal submit SCRIPT", hint=_EXAMPLE)
    first, *rest = command_line
    if first.endswith(".py"):
        return Program(file=_existing(first), args=tuple(rest))
    name = PurePosixPath(first).name
    if re.fullmatch(r"python(3(\.\d+)?)?", name) and rest:
        return _read_python(first, rest)
    if name == "torchrun":
        return _read_torchrun(rest)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _read_accelerate(rest[1:])
    if name == "deepspeed":
        return _read_deepspeed(rest)
    if (way_out := _REFUSED_COMMANDS.get(name)) and not Path(first).exists():
        raise CliError(f"{name} cannot be submitted: {way_out}", hint=_EXAMPLE)
    if re.match(r"[A-Za-z_]\w*=", first):
        assignment = first.partition("=")[0]
        hint = f"shoal submit --set code.env.{assignment}=VALUE -- {' '.join(rest[:2]) or 'python train.py'}"
        raise CliError(f"{first} is not a program; variables of the workers are set with --set code.env", hint=hint)
    if rest:
        raise CliError(
            f"{first} is not a Python script, so {rest[0]!r} after it has no meaning",
            hint=f"a job spec has its arguments in script.args; {_EXAMPLE}",
        )
    return None


_REFUSED_COMMANDS = {
    **dict.fromkeys(
        ("horovodrun", "mpirun", "mpiexec", "srun", "composer", "colossalai", "fabric"),
        "it starts processes itself, and Shoal starts one for each worker; name the Python script that it starts",
    ),
    **dict.fromkeys(
        ("bash", "sh", "zsh", "env", "nohup", "uv", "poetry", "conda", "pipenv"),
        "a job is a Python program; name the script that the command starts",
    ),
    "ray": "`shoal submit` takes its place; name the Python script that `ray job submit` would start",
}
"""Commands that people start programs with, and that are not read -> what to do instead."""


def _read_python(python: str, command_line: Sequence[str]) -> Program:
    options = list(command_line)
    while options and options[0] == "-u":  # each line of output is shown when it is written
        options.pop(0)
    if options[:1] == ["-m"] and len(options) > 1:
        module, rest = options[1], options[2:]
        if module in ("torch.distributed.run", "torch.distributed.launch"):
            return _read_torchrun(rest)
        if module in ("deepspeed.launcher.runner", "deepspeed"):
            return _read_deepspeed(rest)
        if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
            return _read_accelerate(rest[1:] if rest[:1] == ["launch"] else rest)
        return Program(module=module, args=tuple(rest), launcher=Launcher.PYTHON)
    if not options or options[0].startswith("-"):
        what = options[0] if options else "without a script"
        raise CliError(f"{python} {what} cannot be submitted: name a script or a module, -m MODULE", hint=_EXAMPLE)
    return Program(file=_existing(options[0]), args=tuple(options[1:]), launcher=Launcher.PYTHON)


_TORCHRUN_COUNTS = ("nproc_per_node", "nnodes")
_TORCHRUN_NOT_NEEDED = frozenset(
    {
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank"),
        *("local_addr", "local_ranks_filter", "monitor_interval", "start_method", "role"),
    }
)
_TORCHRUN_FLAGS = frozenset({"standalone", "use_env"})


def _read_torchrun(command_line: Sequence[str]) -> Program:
    parsed = _parse_options(
        "torchrun", command_line, _TORCHRUN_FLAGS, (*_TORCHRUN_COUNTS, *_TORCHRUN_NOT_NEEDED), _TORCHRUN_WAYS_OUT
    )
    per_node = _parse_count("torchrun --nproc-per-node", parsed.values.get("nproc_per_node", "1"))
    least, most = parse_workers("torchrun --nnodes", parsed.values.get("nnodes", "1"))
    program = parsed.program
    if parsed.values.keys() & set(_TORCHRUN_COUNTS):
        program = replace(program, workers=(least * per_node, most * per_node))
    left_out = [name for name in parsed.values if name not in _TORCHRUN_COUNTS]
    return replace(program, not_needed=tuple(_dashed(name) for name in left_out))


_TORCHRUN_WAYS_OUT = {
    "max_restarts": "restarts after a failure of the script are --set retry.max_failures=N; lost workers do not count",
    "no_python": "a job is a Python program",
    "log_dir": "`shoal logs JOB` has the lines of every rank",
    "redirects": "`shoal logs JOB` has the lines of every rank",
    "tee": "`shoal logs JOB` has the lines of every rank",
}

_ACCELERATE_ENV = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
}
_ACCELERATE_NOT_NEEDED = frozenset(
    {
        *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "main_training_function"),
        *("rdzv_backend", "rdzv_conf", "same_network", "gpu_ids"),
    }
)
_ACCELERATE_FLAGS = frozenset({"multi_gpu", "same_network", "cpu"})


def _read_accelerate(command_line: Sequence[str]) -> Program:
    """Options on the command line come before those of the configuration, as with accelerate itself."""
    valued = ("num_processes", "num_cpu_threads_per_process", "config_file", *_ACCELERATE_ENV, *_ACCELERATE_NOT_NEEDED)
    parsed = _parse_options("accelerate launch", command_line, _ACCELERATE_FLAGS, valued, _ACCELERATE_WAYS_OUT)
    program = replace(parsed.program, launcher=Launcher.ACCELERATE)
    named = parsed.values.get("config_file")
    path = Path(named) if named else None if "cpu" in parsed.values else default_config(os.environ)
    env: dict[str, str] = {}
    not_needed: list[str] = []
    if path is not None:
        config = read_config(path)
        env |= config.env
        not_needed += config.left_out
        program = replace(program, config_file=path)
        if config.num_processes is not None:
            program = replace(program, workers=(config.num_processes, config.num_processes))
    env |= {variable: parsed.values[name] for name, variable in _ACCELERATE_ENV.items() if name in parsed.values}
    if "num_cpu_threads_per_process" in parsed.values:
        env["OMP_NUM_THREADS"] = parsed.values["num_cpu_threads_per_process"]
    if "cpu" in parsed.values:
        env["ACCELERATE_USE_CPU"] = "true"
    if "num_processes" in parsed.values:
        number = _parse_count("accelerate launch --num_processes", parsed.values["num_processes"])
        program = replace(program, workers=(number, number))
    left_out = [f"--{name}" for name in parsed.values if name in _ACCELERATE_NOT_NEEDED | {"multi_gpu"}]
    return replace(program, env=env, not_needed=(*left_out, *not_needed))


_ACCELERATE_WAYS_OUT = {
    "use_fsdp": "pass FullyShardedDataParallelPlugin to Accelerator in the script",
    "use_deepspeed": "pass DeepSpeedPlugin to Accelerator in the script",
    "use_megatron_lm": "Megatron-LM starts from its own script",
    "tpu": "Shoal trains on CPUs and NVIDIA GPUs",
}

_DEEPSPEED_NOT_NEEDED = frozenset(
    {
        *("hostfile", "master_addr", "master_port", "node_rank", "launcher", "launcher_args", "ssh_port", "save_pid"),
        *("no_ssh", "no_ssh_check", "force_multi", "no_local_rank", "log_level", "quiet", "q", "H"),
    }
)
_DEEPSPEED_FLAGS = frozenset(
    {"no_ssh", "no_ssh_check", "force_multi", "no_local_rank", "save_pid", "quiet", "q", "module"}
)


def _read_deepspeed(command_line: Sequence[str]) -> Program:
    valued = ("num_gpus", "num_accelerators", "num_nodes", *(_DEEPSPEED_NOT_NEEDED - _DEEPSPEED_FLAGS))
    parsed = _parse_options("deepspeed", command_line, _DEEPSPEED_FLAGS, valued, _DEEPSPEED_WAYS_OUT)
    program, values = replace(parsed.program, launcher=Launcher.DEEPSPEED_ENV), parsed.values
    if per_node := values.get("num_gpus", values.get("num_accelerators")):
        number = _parse_count("deepspeed --num_gpus", per_node) * _parse_count(
            "deepspeed --num_nodes", values.get("num_nodes", "1")
        )
        program = replace(program, workers=(number, number))
    elif "num_nodes" in values:
        raise CliError("deepspeed --num_nodes says nothing of the processes", hint="name --num_gpus, or --workers")
    left_out = [f"--{name}" for name in values if name in _DEEPSPEED_NOT_NEEDED - {"no_local_rank"}]
    if "no_local_rank" not in values:
        left_out.append("the argument --local_rank (LOCAL_RANK says the same)")
    return replace(program, not_needed=tuple(left_out))


_DEEPSPEED_WAYS_OUT = {
    "include": "Shoal chooses the GPUs; worker.gpus and the labels of nodes say which",
    "i": "Shoal chooses the GPUs; worker.gpus and the labels of nodes say which",
    "exclude": "Shoal chooses the GPUs; worker.gpus and the labels of nodes say which",
    "e": "Shoal chooses the GPUs; worker.gpus and the labels of nodes say which",
    "no_python": "a job is a Python program",
    "elastic_training": "a job with --workers MIN:MAX is elastic; lost workers do not end it",
    "autotuning": "tune with deepspeed itself, and submit the script with the configuration that it has found",
    "bind_cores_to_rank": "name the cores of a worker: --cpus N",
    "enable_each_rank_log": "`shoal logs JOB` has the lines of every rank",
}


@dataclass(frozen=True, slots=True)
class _ParsedOptions:
    program: Program
    values: Mapping[str, str]
    """Options by name with underscores; a flag has the value "true"."""


def _parse_options(
    launcher: str,
    command_line: Sequence[str],
    flags: frozenset[str],
    valued: Sequence[str],
    ways_out: Mapping[str, str],
) -> _ParsedOptions:
    """Read the options of a launcher up to the program, which has all arguments after it."""
    values: dict[str, str] = {}
    is_module = False
    left: Iterator[str] = iter(command_line)
    for word in left:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word == "--module" and "module" in flags:  # DeepSpeed's: what follows the options is one
            is_module = True
            continue
        if is_module and not word.startswith("-"):
            return _ParsedOptions(Program(module=word, args=tuple(left)), values)
        if word in ("-m", "--module"):
            module = next(left, None)
            if module is None:
                raise CliError(f"{launcher} -m needs a module", hint=_EXAMPLE)
            return _ParsedOptions(Program(module=module, args=tuple(left)), values)
        if not word.startswith("-"):
            return _ParsedOptions(Program(file=_existing(word), args=tuple(left)), values)
        if name in flags and "=" not in word:
            values[name] = "true"
        elif name in valued:
            value = word.partition("=")[2] if "=" in word else next(left, "")
            values[name] = value
        else:
            hint = ways_out.get(name, "leave it out, or submit the script itself: shoal submit train.py --workers 2")
            raise CliError(f"{launcher}: the option {word.partition('=')[0]} is not one that Shoal can read", hint=hint)
    raise CliError(f"{launcher} is given no script", hint=_EXAMPLE)


def _parse_count(option: str, text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) <= 100_000:
        return int(text)
    raise CliError(f"{option} {text!r} is not a number of processes", hint="name one, or give --workers")


def parse_workers(option: str, text: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`. Raises CliError."""
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if all(text.isascii() and text.isdigit() and 0 < int(text) <= 100_000 for text in numbers):
        smallest, largest = map(int, numbers)
        if smallest <= largest:
            return smallest, largest
    raise CliError(
        f"{option} {text!r} is neither a number of workers nor the least and the most of them",
        hint="for example: --workers 4, or --workers 2:8",
    )


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _existing(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    what = "a directory" if path.is_dir() else "not there"
    raise CliError(f"the script {name} is {what}", exit_code=ExitCode.NOT_FOUND, hint="check the path")


def code_directory(program: Program) -> Path:
    """Return the directory whose files the job gets: the current one, if the program is in it; else that of the
    script."""
    here = Path.cwd()
    if program.file is None or program.file.resolve().is_relative_to(here.resolve()):
        return here
    return program.file.resolve().parent


def make_spec(program: Program, max_workers: int | None = None, *, in_place: bool = False) -> dict[str, Any]:
    """Return the job spec of a program, not yet validated. `max_workers` is the option of `shoal submit`.
    `in_place`: the program gives its loop to Shoal."""
    directory = code_directory(program)
    if program.file is None:
        what: dict[str, Any] = {"module": program.module}
    else:
        what = {"file": program.file.resolve().relative_to(directory.resolve()).as_posix()}
    code = {"working_dir": str(directory), **({"env": dict(program.env)} if program.env else {})}
    document: dict[str, Any] = {"name": _name(program), "code": code}
    if program.workers is not None:
        document["elasticity"] = {"min_workers": program.workers[0], "max_workers": program.workers[1]}
    if in_place:
        return {**document, "loop": {**what, "args": list(program.args)}}
    launcher = program.launcher
    if launcher is Launcher.PYTHON and (max_workers or 1) > 1:  # they are to find each other
        launcher = Launcher.TORCHRUN
    return {**document, "script": {**what, "args": list(program.args), "launcher": launcher.value}}


def _name(program: Program) -> str:
    """Name the job after its program, in the letters that a name may have."""
    text = program.file.stem if program.file is not None else program.module or ""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.removesuffix(".__main__"))[:_MAX_NAME].strip("-._")
    return name if is_job_name(name) else "script"


_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
"""Values of `distributed_type` that Shoal can start."""
_LEFT_OUT = frozenset(
    {
        *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
        *("same_network", "main_training_function"),
    }
)
_READ = frozenset(
    {
        *("compute_environment", "distributed_type", "num_processes", "num_cpu_threads_per_process"),
        *("mixed_precision", "use_cpu", "debug", "enable_cpu_affinity", "dynamo_config", "fsdp_config"),
        "gradient_accumulation_steps",
    }
)
_OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables that are not called as their key."""
_EMPTY: tuple[object, ...] = (None, False, "", "no", {}, [])
"""Values of keys that `accelerate config` writes although they say nothing."""


@dataclass(frozen=True, slots=True)
class AccelerateConfig:
    """What a file says."""

    path: Path
    num_processes: int | None
    env: Mapping[str, str]
    left_out: tuple[str, ...]
    """Keys that mean nothing to a job."""


def default_config(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes, and `accelerate launch` reads by default; None if there is
    none."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "accelerate"
    path = folder / "default_config.yaml"
    return path if path.is_file() else None


def read_config(path: Path) -> AccelerateConfig:
    """Read a file. Raises CliError if it is not there or asks for what Shoal does not start."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        hint = "name a file that accelerate config has written"
        raise CliError(f"accelerate's {path}: {error.strerror}", exit_code=ExitCode.NOT_FOUND, hint=hint) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict):
        raise CliError(f"accelerate's {path} is not a YAML file with keys", hint="write it with accelerate config")
    _refuse(path, document)
    left_out = tuple(sorted(key for key in document.keys() & _LEFT_OUT if document[key] not in (None, "", False)))
    number = document.get("num_processes")
    return AccelerateConfig(path, number if isinstance(number, int) and number > 0 else None, _env(document), left_out)


def _refuse(path: Path, document: Mapping[str, Any]) -> None:
    where, kind = document.get("compute_environment", "LOCAL_MACHINE"), document.get("distributed_type", "NO")
    if where != "LOCAL_MACHINE":
        raise CliError(
            f"accelerate's {path}: compute_environment {where} is not one that Shoal starts",
            hint="give --config_file one for LOCAL_MACHINE",
        )
    if kind is not False and kind not in _TYPES:
        raise CliError(
            f"accelerate's {path}: distributed_type {kind} is not one that Shoal starts, which are {', '.join(_TYPES)}",
            hint="pass the plugin to Accelerator in the script, for example DeepSpeedPlugin, and set MULTI_GPU here",
        )
    unknown = [key for key, value in document.items() if key not in _READ | _LEFT_OUT and value not in _EMPTY]
    if unknown:
        raise CliError(
            f"accelerate's {path}: Shoal cannot read {', '.join(map(str, unknown))}",
            hint="remove the key, and set what it stands for in the script or with --set code.env.NAME=VALUE",
        )


def _env(document: Mapping[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = {}
    precision = document.get("mixed_precision")
    if precision is not None:
        variables["ACCELERATE_MIXED_PRECISION"] = "no" if precision is False else str(precision)
    for key, variable in (
        ("use_cpu", "ACCELERATE_USE_CPU"),
        ("debug", "ACCELERATE_DEBUG_MODE"),
        ("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY"),
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("num_cpu_threads_per_process", "OMP_NUM_THREADS"),
    ):
        value = document.get(key)
        if value not in _EMPTY:
            flag = "1" if variable == "ACCELERATE_CPU_AFFINITY" else "true"
            variables[variable] = flag if value is True else str(value)
    for key, value in _prefixed(document.get("dynamo_config"), "dynamo_"):
        variables[f"ACCELERATE_{key}"] = str(value).upper() if key == "DYNAMO_BACKEND" else str(value)
    if document.get("distributed_type") == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
        for key, value in _prefixed(document.get("fsdp_config"), "fsdp_"):
            variables[_OTHER_NAMES.get(key, key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


def _prefixed(section: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return the keys of a section as the ends of variables; accelerate lets their prefix be left out."""
    items = section.items() if isinstance(section, dict) else ()
    named = ((str(key) if str(key).startswith(prefix) else f"{prefix}{key}", value) for key, value in items)
    return [(key.upper(), value) for key, value in named if value is not None]
