"""A program on the command line as a job spec: `shoal submit train.py --workers 2:8 -- --lr 3e-4`, without YAML.

    train.py ARGUMENTS                          a script
    -m package.train ARGUMENTS                  a module
    python | torchrun | accelerate launch |
    deepspeed ...                               the command line that the user has: its launcher's options are read

Hides which options of which launcher mean what: numbers of processes become workers, what only brings processes
together is noted as not needed, and every other option is refused by name. Opens no file but the configuration of
accelerate.

accelerate's options and the keys of its configuration file become workers, and variables of the script:

    num_processes                                   workers
    mixed_precision, use_cpu, dynamo_config ...     variables, as `accelerate launch` sets them
    fsdp_config                                     variables FSDP_..., if distributed_type is FSDP
    machine_rank, main_process_ip, gpu_ids ...      left out: Shoal brings the processes together itself
    deepspeed_config, fp8_config, SageMaker ...     refused by name
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from shoal_api.cli.session import CliError, ExitCode
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
        raise CliError("submit needs a spec or a script: shoal submit SPEC, or shoal submit SCRIPT", hint=_EXAMPLE)
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
            f"{first} is not a Python script, so it cannot take the argument {rest[0]!r}",
            hint=f"a job spec has its arguments in script.args; {_EXAMPLE}",
        )
    return None


_REFUSED_COMMANDS = {
    **dict.fromkeys(
        ("horovodrun", "mpirun", "mpiexec", "srun", "composer", "colossalai", "fabric"),
        "it starts processes, but Shoal already starts one for each worker; name the Python script that it starts",
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


@dataclass(frozen=True, slots=True)
class _LauncherOptions:
    """The options of a launcher, by name with underscores."""

    launcher: str
    read: frozenset[str]
    """Options with a value, which Shoal reads."""
    not_needed: frozenset[str]
    """Options that are left out, because Shoal brings the processes together itself."""
    flags: frozenset[str]
    """Options without a value, whether they are read or not needed."""
    ways_out: Mapping[str, str]
    """What to do instead of other options."""


_TORCHRUN = _LauncherOptions(
    "torchrun",
    read=frozenset({"nproc_per_node", "nnodes"}),
    not_needed=frozenset(
        {
            *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank"),
            *("local_addr", "local_ranks_filter", "monitor_interval", "start_method", "role", "standalone", "use_env"),
        }
    ),
    flags=frozenset({"standalone", "use_env"}),
    ways_out={
        "max_restarts": (
            "--set retry.max_failures=N sets the restarts after failures of the script; lost workers do not count"
        ),
        "no_python": "a job is a Python program",
        **dict.fromkeys(("log_dir", "redirects", "tee"), "`shoal logs JOB` has the lines of every rank"),
    },
)


def _read_torchrun(command_line: Sequence[str]) -> Program:
    program, values = _parse_options(_TORCHRUN, command_line)
    if not values.keys() & _TORCHRUN.read:
        return program
    per_node = _parse_count("torchrun --nproc-per-node", values.get("nproc_per_node", "1"))
    least, most = parse_workers("torchrun --nnodes", values.get("nnodes", "1"))
    return replace(program, workers=(least * per_node, most * per_node))


_ACCELERATE_LEFT_OUT = frozenset(
    {
        *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "main_training_function"),
        *("rdzv_backend", "rdzv_conf", "same_network", "gpu_ids"),
    }
)
"""Options, and keys of the configuration file."""
_ACCELERATE = _LauncherOptions(
    "accelerate launch",
    read=frozenset(
        {
            *("num_processes", "num_cpu_threads_per_process", "config_file", "cpu"),
            *("mixed_precision", "gradient_accumulation_steps", "dynamo_backend"),
        }
    ),
    not_needed=_ACCELERATE_LEFT_OUT | {"multi_gpu"},
    flags=frozenset({"multi_gpu", "same_network", "cpu"}),
    ways_out={
        "use_fsdp": "pass FullyShardedDataParallelPlugin to Accelerator in the script",
        "use_deepspeed": "pass DeepSpeedPlugin to Accelerator in the script",
        "use_megatron_lm": "Megatron-LM starts from its own script",
        "tpu": "Shoal trains on CPUs and NVIDIA GPUs",
    },
)


def _read_accelerate(command_line: Sequence[str]) -> Program:
    """Options on the command line come before those of the configuration, as with accelerate itself."""
    program, values = _parse_options(_ACCELERATE, command_line)
    file = values.pop("config_file", None)
    path = Path(file) if file else None if "cpu" in values else _find_default_config(os.environ)
    config = {} if path is None else _read_config(path)
    left_out = sorted(key for key in config.keys() & _ACCELERATE_LEFT_OUT if config[key] not in (None, "", False))
    if "num_processes" in values:
        config["num_processes"] = _parse_count("accelerate launch --num_processes", values.pop("num_processes"))
    if "dynamo_backend" in values:
        config["dynamo_config"] = {**(config.get("dynamo_config") or {}), "dynamo_backend": values["dynamo_backend"]}
    if "cpu" in values:
        config["use_cpu"] = True
    number = config.get("num_processes")
    return replace(
        program,
        launcher=Launcher.ACCELERATE,
        config_file=path,
        workers=(number, number) if isinstance(number, int) and number > 0 else None,
        env=_make_environment(config | values),
        not_needed=(*program.not_needed, *left_out),
    )


_DEEPSPEED = _LauncherOptions(
    "deepspeed",
    read=frozenset({"num_gpus", "num_accelerators", "num_nodes", "no_local_rank"}),
    not_needed=frozenset(
        {
            *("hostfile", "master_addr", "master_port", "node_rank", "launcher", "launcher_args", "ssh_port"),
            *("save_pid", "no_ssh", "no_ssh_check", "force_multi", "log_level", "quiet", "q", "H"),
        }
    ),
    flags=frozenset({"no_ssh", "no_ssh_check", "force_multi", "no_local_rank", "save_pid", "quiet", "q"}),
    ways_out={
        **dict.fromkeys(
            ("include", "i", "exclude", "e"),
            "Shoal chooses the GPUs; worker.gpus and the labels of nodes say which",
        ),
        "no_python": "a job is a Python program",
        "elastic_training": "a job with --workers MIN:MAX is elastic; lost workers do not end it",
        "autotuning": "run the tuning with deepspeed, then submit the script with the configuration that it found",
        "bind_cores_to_rank": "name the cores of a worker: --cpus N",
        "enable_each_rank_log": "`shoal logs JOB` has the lines of every rank",
    },
)


def _read_deepspeed(command_line: Sequence[str]) -> Program:
    program, values = _parse_options(_DEEPSPEED, command_line)
    program = replace(program, launcher=Launcher.DEEPSPEED_ENV)
    if per_node := values.get("num_gpus", values.get("num_accelerators")):
        num_nodes = _parse_count("deepspeed --num_nodes", values.get("num_nodes", "1"))
        number = _parse_count("deepspeed --num_gpus", per_node) * num_nodes
        program = replace(program, workers=(number, number))
    elif "num_nodes" in values:
        raise CliError(
            "deepspeed --num_nodes does not set the number of processes", hint="name --num_gpus, or --workers"
        )
    if "no_local_rank" in values:
        return program
    return replace(
        program, not_needed=(*program.not_needed, "the argument --local_rank (read LOCAL_RANK of the environment)")
    )


def _parse_options(options: _LauncherOptions, command_line: Sequence[str]) -> tuple[Program, dict[str, str]]:
    """Read the options of a launcher up to the program, which has all arguments after it.

    Returns:
        The program, and the options by name with underscores; a flag has the value "true".
    """
    values: dict[str, str] = {}
    left_out: list[str] = []
    is_module = False
    left: Iterator[str] = iter(command_line)
    for word in left:
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if word in ("-m", "--module"):  # a flag of each launcher: what follows the options is a module
            is_module = True
        elif not word.startswith("-"):
            program = Program(module=word) if is_module else Program(file=_existing(word))
            return replace(program, args=tuple(left), not_needed=tuple(left_out)), values
        elif name in options.flags and not equals:
            values[name] = "true"
        elif name in (options.read | options.not_needed) - options.flags:
            values[name] = value if equals else next(left, "")
        else:
            hint = options.ways_out.get(
                name, "leave it out, or submit the script itself: shoal submit train.py --workers 2"
            )
            raise CliError(f"{options.launcher}: Shoal does not support the option {option}", hint=hint)
        if name in options.not_needed:
            left_out.append(option)
    raise CliError(
        f"{options.launcher} needs a {'module' if is_module else 'script'}, but none is given", hint=_EXAMPLE
    )


_MAX_PROCESSES = 100_000


def _parse_count(option: str, text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_PROCESSES:
        return int(text)
    raise CliError(f"{option} {text!r} is not a number of processes", hint="give a number of at least 1, or --workers")


def parse_workers(option: str, text: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`. Raises CliError."""
    numbers = text.split(":")
    if len(numbers) <= 2 and all(number.isascii() and number.isdigit() for number in numbers):
        least, most = int(numbers[0]), int(numbers[-1])
        if 0 < least <= most <= _MAX_PROCESSES:
            return least, most
    raise CliError(
        f"{option} {text!r} is not a number of workers, nor a range MIN:MAX",
        hint="for example: --workers 4, or --workers 2:8",
    )


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


def _find_default_config(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes, and `accelerate launch` reads by default; None if there is
    none."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "accelerate"
    path = folder / "default_config.yaml"
    return path if path.is_file() else None


def _read_config(path: Path) -> dict[str, Any]:
    """Read a file. Raises CliError if it is not there or asks for what Shoal does not start."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        hint = "name a file that accelerate config has written"
        raise CliError(f"accelerate's {path}: {error.strerror}", exit_code=ExitCode.NOT_FOUND, hint=hint) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict):
        raise CliError(f"accelerate's {path} is not a YAML file with keys", hint="create it with `accelerate config`")
    _refuse(path, document)
    return document


def _refuse(path: Path, document: Mapping[str, Any]) -> None:
    where, kind = document.get("compute_environment", "LOCAL_MACHINE"), document.get("distributed_type", "NO")
    if where != "LOCAL_MACHINE":
        raise CliError(
            f"accelerate's {path}: Shoal cannot start compute_environment {where}",
            hint="use a file for LOCAL_MACHINE: --config_file FILE",
        )
    if kind is not False and kind not in _TYPES:
        raise CliError(
            f"accelerate's {path}: Shoal cannot start distributed_type {kind}; it starts {', '.join(_TYPES)}",
            hint="pass the plugin to Accelerator in the script, for example DeepSpeedPlugin, and set MULTI_GPU here",
        )
    unknown = [
        key for key, value in document.items() if key not in _READ | _ACCELERATE_LEFT_OUT and value not in _EMPTY
    ]
    if unknown:
        raise CliError(
            f"accelerate's {path}: Shoal does not support {', '.join(map(str, unknown))}",
            hint="remove the key, and set the option in the script or with --set code.env.NAME=VALUE",
        )


def _make_environment(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that keys of the configuration stand for, as `accelerate launch` sets them."""
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
