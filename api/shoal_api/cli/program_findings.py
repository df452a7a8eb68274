"""Says what of Shoal a program can use, from its text: `shoal check train.py`. Nothing is imported or run here; what a
loop tracks is found by running it (trial.py).

    script   the program as it is, one process per worker; a lost worker costs the steps since its own last checkpoint
    loop     the program keeps its loop and gives it to `shoal.run`; LOOP_COST says what a lost worker costs
    task     model, data and loss as a class; a lost worker costs one step at most, and its processes live on

What is not found in the text may still be there, so each remark names the lines that it is about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal_api.cli.program_text import (
    TRAINERS,
    Kind,
    ProgramText,
    Use,
    find_function_line,
    is_given,
    literal,
    read_text,
    relative_path,
)
from shoal_api.cli.session import CliError
from shoal_service.core.quantities import count_text

LOOP_COST = (
    "a lost worker costs the step under way; lost within an update, with the only copy of a shard, or together with "
    "all other workers, it costs the steps since the last copy of the state"
)
"""The loss of a loop in place, in the words of docs/loops.md and docs/porting.md."""
_MAX_PLACES = 4
_CHECKPOINT_VARIABLE = "SHOAL_CHECKPOINT_DIR"


@dataclass(frozen=True, slots=True)
class Remark:
    """A finding, for people."""

    words: str
    places: tuple[str, ...] = ()
    """Where: `train.py:12`."""

    def __str__(self) -> str:
        places = ", ".join(self.places[:_MAX_PLACES]) + (", ..." if len(self.places) > _MAX_PLACES else "")
        return f"{self.words} ({places})" if places else self.words


@dataclass(frozen=True, slots=True)
class Findings:
    """What a program can use."""

    program: str
    launcher: str
    distributed: tuple[Remark, ...]
    """What makes one training of several processes."""
    obstacles: tuple[Remark, ...]
    """What stands in the way of the door `script`."""
    cost: Remark
    """What a lost worker costs there."""
    notes: tuple[Remark, ...]
    workers: str
    """Number or range of workers that it can start with."""
    before_task: tuple[Remark, ...]
    """What stands in the way of the door `task`."""
    num_files: int
    is_loop: bool
    """It gives its loop to Shoal."""

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        door = "loop" if self.is_loop else "script" if not self.obstacles else None
        return {"door": door, **asdict(self)}


def examine(script: Path, directory: Path) -> Findings:
    """Read a script, and the modules below `directory` or beside it that it imports.

    Raises:
        CliError: it is not valid Python.
    """
    source = read_text(script, directory)
    distributed = tuple(Remark(name, places) for name, places in _by_name(source, _DISTRIBUTED))
    launcher = _launcher(source, is_distributed=bool(distributed))
    workers = "1" if launcher == "python" else _workers_of_lightning(source) or "1:4"
    return Findings(
        program=relative_path(script, directory),
        launcher=launcher,
        workers=workers,
        distributed=distributed,
        obstacles=tuple(_obstacles(source)),
        cost=_cost(source),
        notes=tuple(_notes(source, is_distributed=bool(distributed), is_elastic=":" in workers)),
        before_task=tuple(_before_task(source)),
        num_files=source.num_files,
        is_loop=bool(source.calls("shoal.run")),
    )


def is_loop(script: Path, directory: Path) -> bool:
    """Return True if the program gives its loop to Shoal: it calls `shoal.run`.

    Raises:
        CliError: it is not valid Python.
    """
    return bool(read_text(script, directory).calls("shoal.run"))


@dataclass(frozen=True, slots=True)
class RayTrain:
    """What a script with a `TorchTrainer` says of its workers, as far as it stands there as numbers."""

    workers: tuple[int, int] | None
    """`ScalingConfig(num_workers=...)`; None if it does not say, or the number is made at run time."""
    gpus: int | None
    cpus: float | None
    max_failures: int | None
    """`FailureConfig(max_failures=...)`."""


def read_ray_train(script: Path, directory: Path) -> RayTrain | None:
    """Return what a script says to Ray Train; None if it has no `TorchTrainer`.

    Raises:
        CliError: it is not valid Python.
    """
    source = read_text(script, directory)
    if not source.calls(*_TORCH_TRAINERS):
        return None
    scaling, failures = source.find_keywords(*_SCALING), source.find_keywords(*_FAILURES)
    resources = literal(scaling.get("resources_per_worker"))
    resources = resources if isinstance(resources, dict) else {}
    numbers = literal(scaling.get("num_workers"))
    numbers = numbers if isinstance(numbers, tuple) else (numbers, numbers)
    has_workers = len(numbers) == 2 and all(isinstance(count, int) and count > 0 for count in numbers)
    uses_gpu, max_failures = literal(scaling.get("use_gpu")), literal(failures.get("max_failures"))
    cpus = resources.get("CPU")
    return RayTrain(
        workers=(numbers[0], numbers[1]) if has_workers else None,
        gpus=None if not isinstance(uses_gpu, bool) else min(1, int(resources.get("GPU", 1))) if uses_gpu else 0,
        cpus=float(cpus) if isinstance(cpus, (int, float)) else None,
        max_failures=None if not isinstance(max_failures, int) else max_failures if max_failures >= 0 else _NO_LIMIT,
    )


def _launcher(source: ProgramText, *, is_distributed: bool) -> str:
    if source.calls(*_TORCH_TRAINERS):
        return "ray_train"
    if source.calls("accelerate.Accelerator"):
        return "accelerate"
    return "torchrun" if is_distributed else "python"


def describe(findings: Findings) -> str:
    """Describe the findings to people."""
    if findings.is_loop:
        return (
            f"{findings.program} calls shoal.run, so submit it as a loop: shoal submit {findings.program} "
            f"--workers 1:4\n  {LOOP_COST}\nthe program was not run, so state that it does not track may "
            "have been missed; without --no-run it is tested"
        )
    launcher = f" --launcher {findings.launcher}" if findings.launcher == "accelerate" else ""
    command = f"shoal submit {findings.program} --workers {findings.workers}{launcher}"
    lines = (
        [f"{findings.program} can run as a script, as it is: {command}"]
        if not findings.obstacles
        else [f"{findings.program} can run as a script after a change: then {command}", *_items(findings.obstacles)]
    )
    lines += [f"  distributed by {remark}" for remark in findings.distributed]
    lines += [f"  a lost worker costs {findings.cost}", *(f"  note: {remark}" for remark in findings.notes)]
    lines += [
        (
            "next: as a loop (docs/loops.md) the program keeps its loop, model and optimizers, and about "
            f"ten lines change: {LOOP_COST}"
        ),
        (
            "then: as a task (docs/tasks.md) a lost worker costs at most one step, the other processes "
            "keep their memory, and every parallel layout can be used"
        ),
    ]
    lines += _items(findings.before_task) or [
        "  no obstacle was found: model, dataset and loss become three methods of a class"
    ]
    files = "" if findings.num_files == 1 else f"read {count_text(findings.num_files, 'file')}; "
    return "\n".join([*lines, f"{files}the program was not run; docs/porting.md compares scripts, loops and tasks"])


def _items(remarks: Iterable[Remark]) -> list[str]:
    return [f"  in the way: {remark}" for remark in remarks]


_LIGHTNING = ("lightning.Trainer", "lightning.Fabric")
_TORCH_TRAINERS = ("ray.train.torch.TorchTrainer", "shoal.ray_train.TorchTrainer")
_SCALING = ("ray.train.ScalingConfig", "ray.air.config.ScalingConfig", "ray.air.ScalingConfig")
_FAILURES = ("ray.train.FailureConfig", "ray.air.config.FailureConfig", "ray.air.FailureConfig")
_NO_LIMIT = 10_000
"""Most failures that a job may have. In Ray Train -1 means any number."""
_DISTRIBUTED = (
    *_TORCH_TRAINERS,
    *("torch.distributed.init_process_group", "torch.nn.parallel.DistributedDataParallel"),
    *("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard"),
    *("torch.distributed._composable.fsdp.fully_shard", "torch.distributed.device_mesh.init_device_mesh"),
    *("accelerate.Accelerator", "deepspeed.initialize", "deepspeed.init_distributed", _LIGHTNING[1]),
    *TRAINERS,
)
_SPAWNERS = (
    *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "accelerate.notebook_launcher"),
    *("accelerate.debug_launcher", "torch.distributed.launcher.api.elastic_launch"),
)
_OTHERS_OF_RAY = (
    *("ray.train.xgboost.XGBoostTrainer", "ray.train.lightgbm.LightGBMTrainer", "ray.train.jax.JaxTrainer"),
    *("ray.train.tensorflow.TensorflowTrainer", "ray.train.horovod.HorovodTrainer"),
    *("ray.train.data_parallel_trainer.DataParallelTrainer", "ray.tune.Tuner", "ray.tune.run", "ray.tune.tuner.Tuner"),
)
_REPORT = "ray.train.report"
"""Saves if it is given a checkpoint."""
_COLLECTIVE_CALLS = frozenset(
    f"torch.distributed.{name}"
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv"),
        "batch_isend_irecv",
    )
)
_ENVIRONMENTS = (
    *("gymnasium.make", "gymnasium.make_vec", "gym.make", "gym.vector.make", "gymnasium.vector.SyncVectorEnv"),
    "gymnasium.vector.AsyncVectorEnv",
)
_SAVERS = (
    *("torch.save", "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"),
    *("safetensors.torch.save_file", ".save_pretrained", ".save_state", ".save_checkpoint", ".save_model"),
)
_LOADERS = (
    "ray.train.get_checkpoint",
    *("torch.load", "torch.distributed.checkpoint.load", "safetensors.torch.load_file", ".load_state_dict"),
    *(".load_state", ".load_checkpoint", "transformers.trainer_utils.get_last_checkpoint"),
)
_WORLD_SIZES = frozenset({".num_processes", ".world_size"})
"""Attributes of trainers and accelerators."""
_RENDEZVOUS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def _obstacles(source: ProgramText) -> Iterator[Remark]:
    for name, places in _by_name(source, _SPAWNERS):
        yield Remark(
            f"{name} starts processes, but Shoal already starts one for each worker: call its function "
            "once, with rank and world size from the environment",
            places,
        )
    for name, places in _by_name(source, _OTHERS_OF_RAY):
        way_out = (
            "use shoal sweep, which submits a job for each combination"
            if ".tune." in name
            else "use TorchTrainer, which runs on Shoal"
        )
        yield Remark(f"{name} starts Ray workers that Shoal does not control: {way_out}", places)
    for call in source.calls_made():
        if call.name != "torch.distributed.init_process_group":
            continue
        method = source.text(call.keywords.get("init_method", next(iter(call.args[1:2]), None)))
        if method and not method.startswith("env://"):
            yield Remark(
                f"init_method {method!r} is the same address for every group, but each group needs a new one: "
                "leave it out",
                (call.place,),
            )
        fixed = [name for name in ("rank", "world_size") if isinstance(call.keywords.get(name), ast.Constant)]
        if fixed:
            yield Remark(
                f"init_process_group gets a fixed {' and '.join(fixed)}, but the size of the group changes: "
                "leave it out",
                (call.place,),
            )
    yield from _remarks_with_places(
        (
            (
                "the program overwrites variables of the process group, such as RANK or MASTER_ADDR: use "
                "os.environ.setdefault"
            ),
            source.places(Kind.WRITE, *_RENDEZVOUS),
        ),
        ("cuda:0 is the same GPU for all processes of a node: use LOCAL_RANK of the environment", source.first_gpus()),
        (
            "input() and breakpoint() fail, because a worker has no terminal: remove them",
            source.calls("input", "breakpoint", "pdb.set_trace"),
        ),
    )


def _remarks_with_places(*findings: tuple[str, tuple[str, ...]]) -> Iterator[Remark]:
    """Yield a remark for each finding that has a place."""
    return (Remark(text, tuple(dict.fromkeys(places))) for text, places in findings if places)


def _cost(source: ProgramText) -> Remark:
    trainers = source.calls(*TRAINERS)
    saves = source.calls(*_SAVERS) + tuple(
        call.place
        for call in source.calls_made()
        if call.name == _REPORT and any(map(is_given, [call.keywords.get("checkpoint"), *call.args[1:2]]))
    )
    loads = source.calls(*_LOADERS) + source.keywords("resume_from_checkpoint", "ckpt_path")
    if loads:
        return Remark("the steps since its last checkpoint, which it loads when it starts", loads)
    if saves:
        return Remark("all steps so far: it saves checkpoints, and no line was found that loads one", saves)
    if trainers:
        return Remark(
            "all steps so far: the trainer is not asked to resume (resume_from_checkpoint, or ckpt_path)", trainers
        )
    return Remark("all steps so far: no line was found that saves or loads a checkpoint")


def _notes(source: ProgramText, *, is_distributed: bool, is_elastic: bool) -> Iterator[Remark]:
    if not is_distributed:
        yield Remark(
            "no distributed training was found: several workers would each train alone. Wrap the model "
            "in DistributedDataParallel to train one model"
        )
    saves = source.calls(*_SAVERS)
    reports = bool(source.calls(_REPORT))
    if saves and not reports and not source.mentions(_CHECKPOINT_VARIABLE) and not source.calls("shoal.checkpoint_dir"):
        yield Remark(
            f"save checkpoints below the directory in {_CHECKPOINT_VARIABLE}, which every node and every "
            "later attempt can read; another directory may be lost with its node",
            saves,
        )
    if not source.calls("shoal.log") and not reports:
        yield Remark(
            "step, loss and remaining time are not reported: add `import shoal`, and "
            "`shoal.log(step=step, loss=loss)` in the loop; outside of Shoal the call does nothing"
        )
    if places := source.places(Kind.READ, "signal.SIGTERM"):
        yield Remark("the program handles SIGTERM and has 10 s to end: --grace SECONDS sets another time", places)
    knows_its_size = source.calls(".get_world_size") or source.places(Kind.READ, *_WORLD_SIZES)
    is_whole = bool(knows_its_size or source.mentions("WORLD_SIZE") or source.keywords("split_batches"))
    places = source.calls("torch.utils.data.DataLoader", ".iter_torch_batches", *TRAINERS)
    if is_elastic and places and not is_whole:
        yield Remark(
            "the global batch is the batch size of a process times the number of workers, so it changes "
            "with the group; divide by WORLD_SIZE to keep it",
            places,
        )


def _before_task(source: ProgramText) -> Iterator[Remark]:
    optimizers = tuple(call.place for call in source.calls_made() if _is_optimizer(call.name))
    backward = source.calls(".backward")
    collectives = source.calls(
        *("torch.distributed.nn.", "torch.distributed._functional_collectives."),
        *(*_COLLECTIVE_CALLS, ".all_gather", ".gather_for_metrics"),
    )
    drawn = source.calls(".sample") if source.calls("torch.distributions.") else ()
    drawn += source.calls("torch.multinomial", ".generate") + source.places(Kind.BASE, "Env")
    return _remarks_with_places(
        ("a trainer runs the loop, but a task has no loop: it has model, data and loss", source.calls(*TRAINERS)),
        (
            f"the program makes {count_text(len(optimizers), 'optimizer')}, but a task has one",
            optimizers if len(optimizers) > 1 else (),
        ),
        (
            "the program runs several backward passes, but a task returns one loss",
            backward if len(backward) > 1 else (),
        ),
        (
            ("the loop calls autograd itself (create_graph, retain_graph), but Shoal runs the backward pass of a task"),
            source.calls("torch.autograd.grad") + source.keywords("create_graph", "retain_graph"),
        ),
        (
            "an IterableDataset has no indices, but a task's dataset needs len() and [index]",
            source.places(Kind.BASE, "IterableDataset"),
        ),
        ("LBFGS needs a closure, but a task's optimizer steps without one", source.calls("torch.optim.LBFGS")),
        (
            "the program calls collectives, but loss() of a task may not: it sees one micro-batch",
            collectives,
        ),
        (
            "the model makes samples while it trains, but a task's dataset does not change",
            source.calls(*_ENVIRONMENTS, "stable_baselines3.") + drawn,
        ),
        (
            "the program keeps averaged weights beside the model: in a task, set optimizer.ema_decay",
            source.calls("torch.optim.swa_utils.AveragedModel"),
        ),
    )


def _is_optimizer(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return (
        owner.startswith("torch.optim")
        and owner.count(".") <= 2
        and last[:1].isupper()
        and not owner.endswith((".lr_scheduler", ".swa_utils"))
    )


def _by_name(source: ProgramText, names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that are called, and where; not the calls that train on one device."""
    for name in names:
        if places := tuple(
            call.place for call in source.calls_made() if call.name == name and _devices_of_lightning(call) != 1
        ):
            yield name, places


def _devices_of_lightning(call: Use) -> int | None:
    """Return on how many devices Lightning is told to train; None if it is not told, or by a value made at run time."""
    names = ("devices", "num_nodes", "accelerator")
    devices, nodes, accelerator = (literal(call.keywords.get(name)) for name in names)
    if call.keywords.get("devices") is None or devices == "auto":
        devices = 1 if accelerator == "cpu" else None
    num = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    nodes = 1 if call.keywords.get("num_nodes") is None else nodes
    return num * nodes if call.name in _LIGHTNING and num and isinstance(nodes, int) else None


def _workers_of_lightning(source: ProgramText) -> str:
    """Return the number of workers without which Lightning refuses to start; empty if there is none."""
    numbers = {num for call in source.calls_made() if (num := _devices_of_lightning(call)) not in (None, 1)}
    return str(numbers.pop()) if len(numbers) == 1 else ""


def refuse_function_as_task(document: dict[str, Any]) -> None:
    """Refuse a spec whose task is a function of a module in its code directory.

    Raises:
        CliError: a script was given as the task; the message names the door for scripts.
    """
    task, directory = document.get("task"), document.get("code", {}).get("working_dir")
    if not isinstance(task, str) or not isinstance(directory, str):
        return
    module, _, name = task.partition(":")
    path = Path(directory).expanduser() / f"{module.replace('.', '/')}.py"
    if (line := find_function_line(path, name)) is not None:
        raise CliError(
            f"task {task}: {name} ({path.name}:{line}) is a function, but a task is a class with "
            "build_model(), build_dataset() and loss()",
            hint=f"a program that trains by itself is a script: shoal submit {path.name} --workers 2; docs/porting.md",
        )
