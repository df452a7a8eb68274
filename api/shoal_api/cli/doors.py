"""Says what of Shoal a program can use, from its text: `shoal check train.py`. Nothing is imported or run here; what a
loop tracks is found by running it (trial.py).

    script   the program as it is, one process per worker; a lost worker costs the steps since its own last checkpoint
    loop     the program keeps its loop and gives it to `shoal.run`; LOOP_COST says what a lost worker costs
    task     model, data and loss as a class; a lost worker costs one step at most, and its processes live on

Parses the program and the modules beside it that it imports, and looks for calls by their full names, so that
`DDP(model)` is found under every name that it was imported as. What it does not find may still be there (a name made at
run time), so each remark names the lines that it is about.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal_api.cli.errors import CliError
from shoal_service.core.quantities import count_text

LOOP_COST = (
    "a lost worker costs the step under way; lost within an update, with the only copy of a shard, or together with "
    "all other workers, it costs the steps since the last copy of the state"
)
"""The loss of a loop in place, in the words of docs/loops.md and docs/porting.md."""
_MAX_FILES = 200
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
    source = _read_all(script, directory)
    distributed = tuple(Remark(name, places) for name, places in _by_name(source, _DISTRIBUTED))
    launcher = _launcher(source, is_distributed=bool(distributed))
    workers = "1" if launcher == "python" else _workers_of_lightning(source) or "1:4"
    return Findings(
        program=_relative(script, directory),
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
    return bool(_read_all(script, directory).calls("shoal.run"))


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
    source = _read_all(script, directory)
    if not source.calls(*_TORCH_TRAINERS):
        return None
    scaling, failures = source.keywords_of(*_SCALING), source.keywords_of(*_FAILURES)
    resources = _literal(scaling.get("resources_per_worker"))
    resources = resources if isinstance(resources, dict) else {}
    numbers = _literal(scaling.get("num_workers"))
    numbers = numbers if isinstance(numbers, tuple) else (numbers, numbers)
    has_workers = len(numbers) == 2 and all(isinstance(count, int) and count > 0 for count in numbers)
    uses_gpu, max_failures = _literal(scaling.get("use_gpu")), _literal(failures.get("max_failures"))
    cpus = resources.get("CPU")
    return RayTrain(
        workers=(numbers[0], numbers[1]) if has_workers else None,
        gpus=None if not isinstance(uses_gpu, bool) else min(1, int(resources.get("GPU", 1))) if uses_gpu else 0,
        cpus=float(cpus) if isinstance(cpus, (int, float)) else None,
        max_failures=None if not isinstance(max_failures, int) else max_failures if max_failures >= 0 else _NO_LIMIT,
    )


def _literal(value: ast.expr | None) -> Any:
    """Return the value of a literal; None if there is none."""
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _launcher(source: _Source, *, is_distributed: bool) -> str:
    if source.calls(*_TORCH_TRAINERS):
        return "ray_train"
    if source.calls("accelerate.Accelerator"):
        return "accelerate"
    return "torchrun" if is_distributed else "python"


def describe(findings: Findings) -> str:
    """Describe the findings to people."""
    if findings.is_loop:
        return (
            f"{findings.program} gives its loop to shoal.run, so Shoal runs it in place: "
            f"shoal submit {findings.program} --workers 1:4\n"
            f"  {LOOP_COST}\n"
            "nothing was run, so it is not known whether it tracks all of its state; without --no-run it is tried"
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
        "next door: as a loop (docs/loops.md) it keeps its loop, model and optimizers, and about ten lines change: "
        f"{LOOP_COST}",
        "then: as a task (docs/tasks.md) a lost worker costs at most one step, processes and memory are kept, and "
        "every parallel layout is open",
    ]
    lines += _items(findings.before_task) or [
        "  nothing that was found stands in its way: model, dataset and loss become three methods of a class"
    ]
    files = "" if findings.num_files == 1 else f"read {count_text(findings.num_files, 'file')}; "
    return "\n".join([*lines, f"{files}nothing was run; docs/porting.md is the map of the doors"])


def _items(remarks: Iterable[Remark]) -> list[str]:
    return [f"  in the way: {remark}" for remark in remarks]


_LIGHTNING = ("lightning.Trainer", "lightning.Fabric")
_TRAINERS = (
    *("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.Trainer"),
    *(f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO", "PPO", "RLOO", "KTO", "ORPO", "CPO", "Reward")),
)
"""Trainers that have the loop, and save and resume by themselves."""
_TORCH_TRAINERS = ("ray.train.torch.TorchTrainer", "shoal.ray_train.TorchTrainer")
_SCALING = ("ray.train.ScalingConfig", "ray.air.config.ScalingConfig", "ray.air.ScalingConfig")
_FAILURES = ("ray.train.FailureConfig", "ray.air.config.FailureConfig", "ray.air.FailureConfig")
_NO_LIMIT = 10_000
"""Most failures that a job may have. In Ray Train -1 means any number."""
_DDP = "torch.nn.parallel.DistributedDataParallel"
_DISTRIBUTED = (
    *_TORCH_TRAINERS,
    *("torch.distributed.init_process_group", _DDP),
    *("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard"),
    *("torch.distributed._composable.fsdp.fully_shard", "torch.distributed.device_mesh.init_device_mesh"),
    *("accelerate.Accelerator", "deepspeed.initialize", "deepspeed.init_distributed", _LIGHTNING[1]),
    *_TRAINERS,
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
_CALLS_OF_ALL_RANKS = {
    *(name for name in _COLLECTIVE_CALLS if not name.endswith(("send", "recv"))),
    *("torch.distributed.barrier", "torch.distributed.monitored_barrier", "torch.distributed.new_group", _REPORT),
    *(".wait_for_everyone", ".gather_for_metrics"),
}
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


def _obstacles(source: _Source) -> Iterator[Remark]:
    for name, places in _by_name(source, _SPAWNERS):
        yield Remark(
            f"{name} starts processes of its own, and Shoal starts one for each worker: call what it starts, once, "
            "with rank and world size from the environment",
            places,
        )
    for name, places in _by_name(source, _OTHERS_OF_RAY):
        way_out = "shoal sweep makes a job of each combination" if ".tune." in name else "TorchTrainer trains on Shoal"
        yield Remark(
            f"{name} starts workers of its own on the Ray cluster, and Shoal does not see them: {way_out}", places
        )
    for call in source.calls_made:
        if call.name != "torch.distributed.init_process_group":
            continue
        method = source.text(call.keywords.get("init_method", next(iter(call.args[1:2]), None)))
        if method and not method.startswith("env://"):
            yield Remark(f"init_method {method!r} is one place for all groups: leave it out", (call.place,))
        fixed = [name for name in ("rank", "world_size") if isinstance(call.keywords.get(name), ast.Constant)]
        if fixed:
            yield Remark(f"{' and '.join(fixed)} of the process group is a fixed number: leave it out", (call.place,))
    by_others = {call.name for call in source.calls_made if call.side == "others"}
    alone = [call for call in source.calls_made if call.side == "rank 0" and call.name not in by_others]
    yield from _remarks_with_places(
        (
            "all ranks have to make this call, and here rank 0 makes it alone: the job would stand still",
            tuple(c.place for c in alone if _CALLS_OF_ALL_RANKS & {c.name, *source.function(c).calls}),
        ),
        (
            "the forward pass of DistributedDataParallel is a call of all ranks, and here rank 0 makes it alone: use "
            "its .module",
            tuple(c.place for c in alone if c.name in source.wrapped or _passes_on(c, source)),
        ),
        (
            "the environment of the process group is overwritten: use os.environ.setdefault",
            source.environment_writes(_RENDEZVOUS),
        ),
        ("cuda:0 is one GPU for all processes of a node: use LOCAL_RANK of the environment", source.first_gpus()),
        (
            "input() and breakpoint() end with an error: a worker has no terminal",
            source.calls("input", "breakpoint", "pdb.set_trace"),
        ),
    )


def _passes_on(call: _Call, source: _Source) -> bool:
    """Return True if the function that is called makes the forward pass of a wrapped model, be it given or global."""
    function = source.function(call)
    if function.calls & source.wrapped - {*function.parameters}:
        return True
    given = [*zip(function.parameters, call.args, strict=False), *call.keywords.items()]
    return any(
        isinstance(value, ast.Name) and value.id in source.wrapped and parameter in function.calls
        for parameter, value in given
    )


def _remarks_with_places(*findings: tuple[str, tuple[str, ...]]) -> Iterator[Remark]:
    """Yield a remark for each finding that has a place."""
    return (Remark(text, tuple(dict.fromkeys(places))) for text, places in findings if places)


def _cost(source: _Source) -> Remark:
    trainers = source.calls(*_TRAINERS)
    saves = source.calls(*_SAVERS) + tuple(
        call.place
        for call in source.calls_made
        if call.name == _REPORT and any(map(_is_given, [call.keywords.get("checkpoint"), *call.args[1:2]]))
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


def _notes(source: _Source, *, is_distributed: bool, is_elastic: bool) -> Iterator[Remark]:
    if not is_distributed:
        yield Remark(
            "nothing was found that is distributed: with several workers, each would train alone. "
            "DistributedDataParallel makes one training of them"
        )
    saves = source.calls(*_SAVERS)
    reports = bool(source.calls(_REPORT))
    if saves and not reports and not source.mentions(_CHECKPOINT_VARIABLE) and not source.calls("shoal.checkpoint_dir"):
        yield Remark(
            f"checkpoints belong below the directory in {_CHECKPOINT_VARIABLE}, which every node reaches and later "
            "attempts see; another directory may be lost with its node",
            saves,
        )
    if not source.calls("shoal.log") and not reports:
        yield Remark(
            "step, loss and the time that is left are not reported: `import shoal`, and `shoal.log(step=step, "
            "loss=loss)` in the loop; elsewhere it does nothing"
        )
    if places := source.reads(["signal.SIGTERM"]):
        yield Remark("it acts on SIGTERM: --grace SECONDS is the time that it gets, 10 without it", places)
    knows_its_size = source.mentions("WORLD_SIZE") or source.calls(".get_world_size") or source.reads(_WORLD_SIZES)
    is_whole = bool(knows_its_size or source.keywords("split_batches"))
    places = source.calls("torch.utils.data.DataLoader", ".iter_torch_batches", *_TRAINERS)
    if is_elastic and places and not is_whole:
        yield Remark(
            "a batch size of each process times the number of workers is the global batch, so it changes with the "
            "group; divide by WORLD_SIZE to keep it",
            places,
        )


def _before_task(source: _Source) -> Iterator[Remark]:
    optimizers = tuple(call.place for call in source.calls_made if _is_optimizer(call.name))
    backward = source.calls(".backward")
    collectives = source.calls(*_COLLECTIVE_CALLS, ".all_gather", ".gather_for_metrics")
    drawn = source.calls(".sample") if source.calls_below("torch.distributions.") else ()
    drawn += source.calls("torch.multinomial", ".generate") + source.bases("Env")
    return _remarks_with_places(
        ("the loop is that of a trainer, and a task has model, data and loss without a loop", source.calls(*_TRAINERS)),
        (
            f"{count_text(len(optimizers), 'optimizer')} are made, and a task has one",
            optimizers if len(optimizers) > 1 else (),
        ),
        ("several backward passes, and a task returns one loss", backward if len(backward) > 1 else ()),
        (
            "gradients of gradients or a kept graph are the loop's own, which a task does not have",
            source.calls("torch.autograd.grad") + source.keywords("create_graph", "retain_graph"),
        ),
        (
            "an IterableDataset has no indices, and a task's dataset has len() and [index]",
            source.bases("IterableDataset"),
        ),
        ("LBFGS needs a closure", source.calls("torch.optim.LBFGS")),
        (
            "collectives of its own; a task's loss sees one micro-batch and calls none",
            source.calls_below("torch.distributed.nn.", "torch.distributed._functional_collectives.") + collectives,
        ),
        (
            "samples are made by the model while it trains, and a task's dataset does not change",
            source.calls(*_ENVIRONMENTS) + source.calls_below("stable_baselines3.") + drawn,
        ),
        ("averaged weights are kept beside the model", source.calls("torch.optim.swa_utils.AveragedModel")),
    )


def _is_optimizer(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return (
        owner.startswith("torch.optim")
        and owner.count(".") <= 2
        and last[:1].isupper()
        and not owner.endswith((".lr_scheduler", ".swa_utils"))
    )


def _by_name(source: _Source, names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that are called, and where; not the calls that train on one device."""
    for name in names:
        if places := tuple(
            call.place for call in source.calls_made if call.name == name and _devices_of_lightning(call) != 1
        ):
            yield name, places


def _devices_of_lightning(call: _Call) -> int | None:
    """Return on how many devices Lightning is told to train; None if it is not told, or by a value made at run time."""
    names = ("devices", "num_nodes", "accelerator")
    devices, nodes, accelerator = (_literal(call.keywords.get(name)) for name in names)
    if call.keywords.get("devices") is None or devices == "auto":
        devices = 1 if accelerator == "cpu" else None
    num = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
    nodes = 1 if call.keywords.get("num_nodes") is None else nodes
    return num * nodes if call.name in _LIGHTNING and num and isinstance(nodes, int) else None


def _workers_of_lightning(source: _Source) -> str:
    """Return the number of workers without which Lightning refuses to start; empty if there is none."""
    numbers = {num for call in source.calls_made if (num := _devices_of_lightning(call)) not in (None, 1)}
    return str(numbers.pop()) if len(numbers) == 1 else ""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    """Full name of what is called; `.backward` for a method of an object whose class is not known."""
    place: str
    keywords: dict[str, ast.expr]
    args: tuple[ast.expr, ...]
    side: str = ""
    """`rank 0` if the call stands below `if rank == 0`, `others` if in its else; empty: all ranks make it."""


@dataclass
class _Function:
    """What a function of the program calls on each rank that calls it."""

    parameters: list[str]
    calls: set[str] = field(default_factory=set)


@dataclass
class _Source:
    """The text of a program: its calls, in the order of its lines."""

    calls_made: list[_Call] = field(default_factory=list)
    classes: list[tuple[str, str]] = field(default_factory=list)
    """Last part of the name of each base, and its place."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    writes: list[tuple[str, str]] = field(default_factory=list)
    """Keys that are assigned in os.environ."""
    names: list[tuple[str, str]] = field(default_factory=list)
    """Full names that are read."""
    trainers: dict[str, str] = field(default_factory=dict)
    """Names of classes whose base is one of _TRAINERS, and that base."""
    wrapped: set[str] = field(default_factory=set)
    """Names of variables that are models in DistributedDataParallel."""
    texts_by_name: dict[str, str] = field(default_factory=dict)
    """What is assigned to variables, or what it begins with."""
    functions: dict[str, _Function] = field(default_factory=dict)
    """Functions of the program: `FILE:NAME` for calls in the file, `MODULE.NAME` for others."""
    num_files: int = 0

    def calls_below(self, *packages: str) -> tuple[str, ...]:
        """Return where something of these packages is called."""
        return tuple(call.place for call in self.calls_made if call.name.startswith(packages))

    def calls(self, *names: str) -> tuple[str, ...]:
        """Return where one of these is called. A name that begins with a dot is a method of any object."""
        methods = tuple(name for name in names if name.startswith("."))
        return tuple(
            call.place for call in self.calls_made if call.name in names or call.name.endswith(methods or ("\0",))
        )

    def keywords_of(self, *names: str) -> dict[str, ast.expr]:
        """Return the keywords of the only call of one of these; {} if there are several, which may differ."""
        calls = [call for call in self.calls_made if call.name in names]
        return calls[0].keywords if len(calls) == 1 else {}

    def keywords(self, *names: str) -> tuple[str, ...]:
        return tuple(
            call.place for call in self.calls_made if any(_is_given(call.keywords.get(name)) for name in names)
        )

    def bases(self, name: str) -> tuple[str, ...]:
        return tuple(place for base, place in self.classes if base == name)

    def environment_writes(self, keys: frozenset[str]) -> tuple[str, ...]:
        return tuple(place for key, place in self.writes if key in keys)

    def function(self, call: _Call) -> _Function:
        """Return the function of the program that is called; one that calls nothing if it is none."""
        here = f"{call.place.rpartition(':')[0]}:{call.name}"
        return self.functions.get(here) or self.functions.get(call.name) or _Function([])

    def mentions(self, text: str) -> bool:
        return any(text in literal for literal, _ in self.texts)

    def text(self, value: ast.expr | None) -> str:
        """Return a text, or what it begins with, also over a variable; empty for another expression."""
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=[first, *_]) | ast.BinOp(left=first) | ast.Call(func=ast.Attribute(value=first)):
                return self.text(first)
            case ast.Name(id=name):
                return self.texts_by_name.get(name, "")
        return ""

    def reads(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return where one of these attributes is read."""
        return tuple(place for name, place in self.names if name in names)

    def first_gpus(self) -> tuple[str, ...]:
        """Return where the first GPU of a node is named, whatever the rank."""
        named = [place for text, place in self.texts if text == "cuda:0"]
        by_call = (
            call.place
            for call in self.calls_made
            if (call.name.endswith((".cuda", "torch.cuda.set_device")) and _is_zero(call.args[:1]))
            or (call.name == "torch.device" and _is_zero(call.args[1:2]))
        )
        return tuple(dict.fromkeys([*named, *by_call]))


def _is_given(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value in (None, False))


def _is_zero(values: Sequence[ast.expr]) -> bool:
    return any(isinstance(item, ast.Constant) and item.value == 0 and item.value is not False for item in values)


def _read_all(script: Path, directory: Path) -> _Source:
    source = _Source()
    roots = [script.resolve().parent, directory.resolve()]
    left, seen = [script.resolve()], {script.resolve()}
    while left and source.num_files < _MAX_FILES:
        path = left.pop(0)
        visitor = _Visitor(source, _relative(path, directory))
        tree = _parsed(path, is_script=not source.num_files)
        source.num_files += 1
        if tree is None:
            continue
        visitor.visit(tree)
        for name in visitor.imported:
            for file in _local_files(name, path, roots):
                if file not in seen:
                    seen.add(file)
                    left.append(file)
    trainers = source.trainers
    source.calls_made = [
        replace(call, name=trainers.get(call.name.rpartition(".")[2], call.name)) for call in source.calls_made
    ]
    return source


def _parsed(path: Path, *, is_script: bool) -> ast.Module | None:
    """Parse a file. One that the script imports may be for another version of Python: it is passed over."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        if is_script:
            raise CliError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        if is_script:
            line = getattr(error, "lineno", None)
            raise CliError(
                f"{path.name}{f':{line}' if line else ''} is not valid Python: {getattr(error, 'msg', error)}",
                hint="a program in Python can be checked",
            ) from None
    return None


def _local_files(name: str, path: Path, roots: Iterable[Path]) -> Iterator[Path]:
    """Find the files of a module that is part of the program. `name`: with a leading dot for each level if relative."""
    levels = len(name) - len(name.lstrip("."))
    parts = [part for part in name.split(".") if part]
    folders = [path.parents[min(levels, len(path.parents)) - 1]] if levels else roots
    for folder in folders:
        for count in range(1, len(parts) + 1):
            module = folder.joinpath(*parts[:count])
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file():
                    yield file.resolve()


def _relative(path: Path, directory: Path) -> str:
    path, directory = path.resolve(), directory.resolve()
    return path.relative_to(directory).as_posix() if path.is_relative_to(directory) else str(path)


_SAME = (
    ("lightning.pytorch.", "lightning."),
    ("pytorch_lightning.", "lightning."),
    ("lightning.fabric.", "lightning."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("transformers.trainer.", "transformers."),
)
"""Other paths of the same names."""


class _Visitor(ast.NodeVisitor):
    """Reads a file into a `_Source`, with the names that its imports give."""

    def __init__(self, source: _Source, file: str) -> None:
        self._source = source
        self._file = file
        self._names: dict[str, str] = {}
        self._side = ""
        """Which ranks alone are here, as in `_Call`."""
        self._function: _Function | None = None
        self._conditions: dict[str, ast.expr] = {}
        """What is assigned to variables that may say which rank this is."""
        self.imported: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.append(alias.name)
            self._names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        self.imported.append(module)
        for alias in node.names:
            separator = "" if not module or module.endswith(".") else "."
            self.imported.append(f"{module}{separator}{alias.name}")
            if not node.level:
                self._names[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        call = _Call(self._name(node.func), self._place(node), keywords, tuple(node.args), self._side)
        self._source.calls_made.append(call)
        if self._function is not None and not call.side:
            self._function.calls.add(call.name)
        if call.name == "os.environ.update":
            self._write(node, *node.args)
        self.generic_visit(node)

    def _write(self, node: ast.expr | ast.stmt, *given: ast.expr) -> None:
        """Note the keys of what is written into the environment: keywords, `{...}` or `dict(...)`."""
        for value in (node, *given):
            keys = value.keys if isinstance(value, ast.Dict) else value.keywords if isinstance(value, ast.Call) else []
            names = (key.arg if isinstance(key, ast.keyword) else getattr(key, "value", None) for key in keys)
            self._source.writes += [(str(name), self._place(node)) for name in names]

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._name(node.target) == "os.environ":
            self._write(node, node.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        before, (of_body, of_else) = self._side, self._sides(node.test)
        for side, statements in ((of_body, node.body), (of_else, node.orelse)):
            self._side = before or side
            for statement in statements if isinstance(statements, list) else [statements]:
                self.visit(statement)
        is_left = isinstance(node.body, list) and isinstance(node.body[-1], ast.Return)
        self._side = before or (of_else if is_left else "")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`rank == 0 and dist.barrier()`"""
        before = self._side
        for value in node.values:
            self.visit(value)
            self._side = self._side or self._sides(value)[isinstance(node.op, ast.Or)]
        self._side = before

    def _sides(self, test: ast.expr) -> tuple[str, str]:
        """Return the sides, as in `_Call`, of the branch of a condition and of its else."""
        values = [_value(test, rank, self._conditions) for rank in (0, 1, 2)]
        is_here, is_there, is_beyond = (None if value is None else bool(value) for value in values)
        if is_there is not is_beyond:
            return "", ""
        of_body = "rank 0" if is_there is False and is_here is not False else ""
        of_else = "rank 0" if is_there and not is_here else ""
        return of_body or ("others" if of_else else ""), of_else or ("others" if of_body else "")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A definition below `if rank == 0` does not say which ranks call the function. Code after
        `if rank != 0: return` runs on rank 0 alone, to the end of the function."""
        before, self._side = (self._side, self._function), ""
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        self._function = function = _Function(parameters)
        module = self._file.removesuffix(".py").replace("/", ".")
        self._source.functions |= {f"{self._file}:{node.name}": function, f"{module}.{node.name}": function}
        self.generic_visit(node)
        self._side, self._function = before

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(inner, ast.Call) and self._name(inner.func) == _DDP for inner in ast.walk(node.value)):
            self._source.wrapped.update(self._name(target) for target in node.targets)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._conditions[target.id] = node.value
                self._source.texts_by_name[target.id] = self._source.text(node.value)
                if self._name(node.value) == "os.environ":
                    self._names[target.id] = "os.environ"
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = self._name(base)
            last = name.rpartition(".")[2]
            self._source.classes.append((last, self._place(node)))
            name = self._source.trainers.get(last, name)
            if name in _TRAINERS:
                self._source.trainers[node.name] = name
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._source.names.append((self._name(node), self._place(node)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._source.texts.append((node.value, self._place(node)))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = node.slice
        if isinstance(node.ctx, ast.Store) and isinstance(key, ast.Constant) and self._name(node.value) == "os.environ":
            self._source.writes.append((str(key.value), self._place(node)))
        self.generic_visit(node)

    def _name(self, node: ast.expr) -> str:
        """Return the full name of an expression, as its imports give it."""
        if isinstance(node, ast.Name):
            return _usual_name(self._names.get(node.id, node.id))
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._name(node.value)
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        is_module = isinstance(root, ast.Name) and root.id in self._names
        return _usual_name(f"{owner}.{node.attr}" if is_module or owner == "os.environ" else f".{node.attr}")

    def _place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self._file}:{node.lineno}"


def _usual_name(name: str) -> str:
    """Return the name by which an object is known that has others."""
    if name.startswith("trl."):  # its trainers move between its packages
        return f"trl.{name.rpartition('.')[2]}"
    for other, usual in _SAME:
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


_RANKS = frozenset({"rank", "global_rank", "local_rank", "world_rank", "get_rank", "get_world_rank", "get_local_rank"})
_OF_RANK_0 = frozenset(
    {"is_main_process", "is_local_main_process", "is_master", "is_main", "master_process", "is_rank_zero"}
    | {"is_world_process_zero", "is_global_zero"}
)


def _value(node: ast.expr, rank: int, assigned: dict[str, ast.expr]) -> Any:
    """Evaluate a condition such as `rank == 0` or `not is_main_process` for one rank; None if it depends on more."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=operation, operand=operand):
            value = _value(operand, rank, assigned)
            return None if value is None else -value if isinstance(operation, ast.USub) else not value
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return [_value(element, rank, assigned) for element in elements]
        case ast.BoolOp(op=operation, values=operands):
            values = [_value(operand, rank, assigned) for operand in operands]
            decides = isinstance(operation, ast.Or)
            is_decided = any(value is not None and bool(value) is decides for value in values)
            return decides if is_decided else None if None in values else not decides
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            return _compared(operation, _value(left, rank, assigned), _value(right, rank, assigned))
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            value = _value(inner, rank, assigned)
            return int(value) if isinstance(value, str) and value.isdecimal() else value
        case (
            ast.Subscript(slice=ast.Constant(value="RANK" | "LOCAL_RANK"))
            | ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(value="RANK" | "LOCAL_RANK"), *_])
        ):
            return str(rank)
        case ast.Call(func=ast.Name() | ast.Attribute() as called):
            return _value(called, rank, {})
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if name.lower() in _RANKS:
                return rank
            if name in _OF_RANK_0:
                return rank == 0
            if isinstance(node, ast.Name) and name in assigned:
                others = {other: value for other, value in assigned.items() if other != name}
                return _value(assigned[name], rank, others)
    return None


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _compared(operation: ast.cmpop, left: Any, right: Any) -> bool | None:
    compare = _COMPARISONS.get(type(operation))
    try:
        return None if compare is None or left is None or right is None else bool(compare(left, right))
    except TypeError:
        return None


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
    if (line := function_line(path, name)) is not None:
        raise CliError(
            f"task {task}: {name} ({path.name}:{line}) is a function, and a task is a class with build_model(), "
            "build_dataset() and loss()",
            hint=f"a program that trains by itself is a script: shoal submit {path.name} --workers 2; docs/porting.md",
        )


def function_line(path: Path, name: str) -> int | None:
    """Return the line of a function at the top level of a module; None if there is no such module or function."""
    if not path.is_file():
        return None
    tree = _parsed(path, is_script=False)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node.lineno
    return None
