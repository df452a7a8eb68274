"""The contract between Shoal and a task, its defaults, and its checks. docs/tasks.md explains it to users.

A task is a plain class that imports nothing from Shoal. It must have the methods of `Task`; everything else has a
default. Hidden here: what a task leaves out, and that its signatures are checked before the first call is made: a wrong
call has no frame of the task on its stack, so its exception alone would not say whose fault it is. An exception of its
code becomes a TaskFailed that carries the user's own traceback, without the engine's frames (user_code.py). Called by
the engine and the passes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal_workers.contract.mixture_weights import InForce, began, in_force, late
from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.contract.spec import BatchSync, JobSpec
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.engine.length_buckets import Bucket, LengthBuckets
from shoal_workers.engine.parallel.global_norm import synchronise
from shoal_workers.engine.parallel.sharding import default_shard_units
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.task.alternation import METRIC, Alternation, alternation_of
from shoal_workers.engine.task.data_identity import content_hash_of
from shoal_workers.engine.task.returned import Metrics, Returned, describe_kind, place_of, read_returned
from shoal_workers.engine.task.task_collectives import refuse_wrapped

_SHOWN_CLASSES = 12


@runtime_checkable
class Dataset(Protocol):
    """Map-style: a length and random access. A sample is a tensor, or a dict or tuple of tensors.

    One with `samples_at(positions: range, seed: int) -> list[int]` has an order of its own: the indices of the samples
    at these positions of the run, a pure function of both. Otherwise each epoch is another permutation. One with
    `lengths` and `tokens_per_micro_batch` is read in micro-batches of similar lengths, see length_buckets.py. What one
    does not read of its source is in `left_out: Mapping[str, int]`, numbers by reason, for the job's log.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Task(Protocol):
    """What a task must have. Constructed once per worker as `Task(model=..., data=..., seed=...)`.

    Optional members, looked up by name:

        prepare(progress: Callable[[str], None]) -> None
            Before anything else: download, tokenise. The first worker of a node calls it alone; the others see its
            progress and call it afterwards, together. So it must find what is there already, and not wait for other
            workers. `progress("...")` shows a note to people, and moves the deadline `timeouts.start_s` on.
        build_optimizer(model: nn.Module, settings: dict) -> torch.optim.Optimizer
            Default: AdamW. `settings` is the spec's `optimizer` section. The parameters are DTensors at this point.
        elementwise_optimizer: bool | None = None
            Whether that optimizer is pure and elementwise. None means only if its class is known: see docs/tasks.md.
        deferred_init: bool = False
            Whether Shoal may draw the weights after it has split the model, from the distributions that build_model
            fills parameters with: then no worker holds the whole model. See docs/tasks.md.
        initial_weights: str | None = None
            A safetensors file or directory, read after build_model has returned: the model begins with these weights,
            as with the spec's `init_from`, which takes precedence.
        collate(samples: list) -> batch
            Default: torch.utils.data.default_collate.
        shard_units(model: nn.Module) -> Iterable[nn.Module]
            The modules whose parameters are gathered and freed together. Default: `default_shard_units`.
        export_config(model: nn.Module) -> dict
            What `shoal export` needs, as JSON: {"config": the content of config.json, "renames": [[regular expression,
            replacement], ...], applied in this order to each parameter's name}. Default: names stay.
        embed(model: nn.Module, batch) -> Tensor | tuple[Tensor, ...]
        batch_loss(*embeddings: Tensor) -> Tensor | tuple[Tensor, Mapping[str, Any]]
            Both or none: the training's loss of a whole global batch, of what `embed` makes of each micro-batch. `loss`
            is then that of the validation. See docs/tasks.md.
        optimizers: Mapping[str, str | list[str]]
        updates: list[str]
        training_step(model: nn.Module, batch, optimizers: Mapping[str, OptimizerState]) -> Mapping[str, Any]
            Alternating updates: the patterns of the parameters that each optimizer updates, the order of a round, and a
            loss for each, or a function that computes it. See docs/tasks.md and alternation.py.
        remarks: Sequence[str] = ()
            Sentences about the data for the job's log, read after the data is opened.
        tokens_per_sample: int = 1
        bytes_per_token: float | None = None
            If present, validation also reports bits per byte: loss / ln 2 / bytes_per_token.
    """

    def __init__(self, *, model: dict[str, Any], data: dict[str, Any], seed: int) -> None: ...

    def build_model(self) -> nn.Module:
        """Builds the model on the CPU, with torch's RNG seeded from the spec's seed: every rank must build the same
        weights."""
        ...

    def build_dataset(self, split: str) -> Dataset | None:
        """`split` is "train" or "validation"; only the latter may be None or empty."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Any, ...]:
        """Scalar: the mean over the samples of a micro-batch. Must call `model(...)`, not methods of it.

        Or `(sum, weight)`: a sum over what counts in it, and how much counts. Or `(loss, {"accuracy": value})` and
        `(sum, weight, {"accuracy": value})`: with metrics of the task's own, each a mean too."""
        ...


class LoadedTask:
    """A task, with defaults for what it does not define. Its methods raise whatever the user's code raises."""

    def __init__(self, task: Any, spec: JobSpec) -> None:
        self._task = task
        self._spec = spec
        self._collate: Callable[[list[Any]], Any] = getattr(task, "collate", None) or default_collate
        self.remarks: list[str] = []
        """Sentences about the data for the job's log, after `open_data`."""
        self.validation_data: Dataset | None = None
        """None if there is none, or the job does not validate."""
        self._train_data: Dataset | None = None
        self._has_buckets = False
        self.alternation: Alternation | None = alternation_of(task)
        """None means each step updates all parameters with `loss`."""
        self.export: dict[str, Any] = {"config": {"task": spec.task, "model": spec.model}, "renames": []}
        """Saved in every checkpoint, see shoal_workers/export.py; final once a model has been built."""

    @property
    def instance(self) -> object:
        """The object of the user's class."""
        return self._task

    def collate(self, samples: list[Any]) -> Any:
        """The batch of a micro-batch's samples, or of its buckets'."""
        if any(isinstance(sample, Bucket) for sample in samples):
            samples = [sample for bucket in samples for sample in bucket]
        return self._collate(samples)

    def evaluate(self, model: nn.Module, batch: Any) -> Returned:
        """The task's loss of a micro-batch, and its metrics. Raises also for what is neither."""
        returned = read_returned(self._task.loss(model, batch), self._task.loss)
        if returned.weight is None and self._has_buckets:
            raise ValueError(
                f"{self.line_of('loss')}: loss() returned a mean, and the dataset has tokens_per_micro_batch, so "
                "micro-batches have different numbers of samples. Return (sum, weight): docs/tasks.md, a mean over "
                "tokens."
            )
        return returned

    def evaluate_step(self, model: nn.Module, batch: Any, step: int) -> Returned:
        """The loss of a micro-batch in the training step that follows `step` completed ones, and its metrics."""
        if self.alternation is None:
            return self.evaluate(model, batch)
        function = self._task.training_step
        returned = function(model, batch, self.alternation.optimizers(step))
        value = self.alternation.loss_of(returned, step, self.line_of("training_step"))
        training_returned = read_returned(value, function, "training_step")
        loss = training_returned.loss.detach().double().reshape(())
        mean = loss if training_returned.weight is None else loss / training_returned.weight
        return replace(
            training_returned, metrics={**training_returned.metrics, METRIC.format(self.alternation.name(step)): mean}
        )

    @property
    def has_batch_loss(self) -> bool:
        """True if the training's loss is one of the whole global batch."""
        return getattr(self._task, "batch_loss", None) is not None

    def embed(self, model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
        """What the loss of the whole batch needs of a micro-batch's samples: each of shape (samples, ...)."""
        value = self._task.embed(model, batch)
        tensors = (value,) if isinstance(value, Tensor) else tuple(value) if isinstance(value, tuple | list) else ()
        size = self._spec.batch.micro_size
        if not tensors or not all(
            isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == size for tensor in tensors
        ):
            shapes = ", ".join(
                str(list(tensor.shape)) if isinstance(tensor, Tensor) else describe_kind(tensor) for tensor in tensors
            )
            raise ValueError(
                f"{self.line_of('embed')}: embed() returned {shapes or describe_kind(value)}. Return a tensor, or a "
                f"tuple of tensors, each with one row for each of the {size} samples of the micro-batch."
            )
        return tuple(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors)

    def batch_loss(self, embeddings: Sequence[Tensor]) -> Returned:
        """The loss of all samples of a step, of which each tensor has a row for each."""
        returned = read_returned(self._task.batch_loss(*embeddings), self._task.batch_loss, "batch_loss")
        if returned.weight is not None:
            raise ValueError(
                f"{self.line_of('batch_loss')}: batch_loss() returned a weight. It has all samples of the step: return "
                "their loss as it is."
            )
        return returned

    def line_of(self, member: str) -> str:
        """Returns where a member of the task is defined: `digits.py:38 in loss()`; empty: nowhere that can be named."""
        function: Any = getattr(self._task, member, None)
        return f"{place_of(function)} in {member}()" if hasattr(function, "__code__") else ""

    def metrics(self, device: torch.device, *, writes_log: bool, of_steps: bool = False) -> Metrics:
        """Returns an object for the metrics of one generation's training, or of its validation. `of_steps`: those of
        `training_step`."""
        function = self._task.training_step if of_steps else self._task.loss
        return Metrics(function, device, writes_log=writes_log)

    @property
    def train_data(self) -> Dataset:
        """Data of the training. Called after `open_data`."""
        assert self._train_data is not None, "open_data comes first"
        return self._train_data

    @property
    def content_hash(self) -> str:
        """Content hash of the training data, after `open_data`; empty: the dataset has none."""
        return content_hash_of(self.train_data)

    def change_weights(
        self, spec: JobSpec, recorded: Sequence[InForce], step: int
    ) -> tuple[tuple[InForce, ...], InForce | None]:
        """Puts the changes of a mixture's weights into force, for a group that goes on after `step` completed steps.
        Data without weights has no changes.

        Args:
            spec: with the settings of the generation.
            recorded: the changes that took effect before, as the restored state says.

        Returns:
            The changes that hold, and the one that takes effect later than the spec says.
        """
        change = getattr(self.train_data, "change_weights", None)
        if change is None:
            return (), None
        wanted = TextDataConfig.model_validate(spec.data).wanted_weights
        weights = in_force(recorded, wanted, step)
        change(weights, spec.samples_per_step)
        return weights, late(wanted, weights[len(began(recorded, step)) :])

    @property
    def has_preparation(self) -> bool:
        return getattr(self._task, "prepare", None) is not None

    def prepare(self, progress: Callable[[str], None]) -> None:
        if prepare := getattr(self._task, "prepare", None):
            prepare(progress)

    @property
    def tokens_per_sample(self) -> int:
        return int(getattr(self._task, "tokens_per_sample", 1))

    @property
    def bytes_per_token(self) -> float | None:
        """Read late: a task may know it only after it has read its text."""
        value = getattr(self._task, "bytes_per_token", None)
        return None if value is None else float(value)

    def open_data(self) -> None:
        """Open the splits that the job reads."""
        self.validation_data = self._build_dataset("validation") if self._spec.validation.samples else None
        self._train_data = self._build_dataset("train")
        self.remarks += getattr(self._task, "remarks", ())

    def _build_dataset(self, split: str) -> Dataset | None:
        data = self._task.build_dataset(split)
        left_out = getattr(data, "left_out", None)
        if isinstance(left_out, Mapping) and left_out:
            reasons = ", ".join(f"{reason}: {number:,}" for reason, number in left_out.items())
            self.remarks.append(f"left out of the {split} data: {reasons}.")
        if split != "train" and (data is None or len(data) == 0):
            if data is not None:
                self.remarks.append(
                    "the job does not validate, because its data has no validation split: a small data set may have "
                    "none. Name data for it, set data.validation_fraction higher, or validation.samples: 0."
                )
            return None
        if data is None or len(data) == 0:
            raise ValueError(
                f"{self.line_of('build_dataset')}: build_dataset({split!r}) returned "
                f"{'None' if data is None else 'no samples'}. Check what it reads: the training split needs at least "
                "one sample."
            )
        if isinstance(data, DataLoader | IterableDataset):
            raise TypeError(
                f"{self.line_of('build_dataset')}: build_dataset({split!r}) returned {describe_kind(data)}, but Shoal "
                "itself chooses which samples are read, and makes the batches. Two ways out: return a map-style "
                "dataset, with __len__ and __getitem__ (that of the loader), which batch.num_workers reads ahead; or "
                "read the loader or the stream in a loop, with run.batches(...), see docs/loops.md."
            )
        if getattr(data, "tokens_per_micro_batch", None) is None:
            return data  # type: ignore[no-any-return]
        where = f"{self.line_of('build_dataset')}: the dataset has tokens_per_micro_batch"
        if self._spec.batch.micro_size != 1:
            raise ValueError(
                f"{where}, so a micro-batch has as many samples as fit, and batch.micro_size is "
                f"{self._spec.batch.micro_size}. Set it to 1; batch.global_size is then the number of micro-batches in "
                "a step."
            )
        if self.has_batch_loss:
            raise ValueError(
                f"{where}, and the task has embed() and batch_loss(), whose micro-batches must have equally many "
                "samples. Remove one of the two."
            )
        self._has_buckets = True
        return LengthBuckets(data, self._spec.seed)

    def build_model(self) -> nn.Module:
        """Makes the same weights in every worker: the RNG is seeded first."""
        seed_everything(self._spec.seed)
        model = self._task.build_model()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{self.line_of('build_model')}: build_model() returned {describe_kind(model)}, not a torch.nn.Module. "
                "Does it end with `return model`?"
            )
        if self._spec.batch.sync is BatchSync.GLOBAL:
            synchronise(model, self.line_of("build_model"))
        refuse_wrapped(model, self.line_of("build_model"))
        if describe := getattr(self._task, "export_config", None):
            described = describe(model)
            if not isinstance(described, Mapping):
                raise TypeError(
                    f"{self.line_of('export_config')}: export_config() returned {describe_kind(described)}, not a dict "
                    'with "config" and "renames".'
                )
            self.export = dict(described)
        return model

    def build_optimizer(self, model: nn.Module, settings: OptimizerSpec) -> Optimizer | None:
        """The task's own optimizer of a model that is already sharded; None if the task defines none."""
        build = getattr(self._task, "build_optimizer", None)
        if build is None:
            return None
        optimizer = build(model, settings.model_dump())
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{self.line_of('build_optimizer')}: build_optimizer() returned {describe_kind(optimizer)}, not a "
                "torch.optim.Optimizer. A task has one optimizer. Updates of several in turn have training_step(), "
                "see docs/tasks.md; a program with a loop of its own is a script, see docs/porting.md."
            )
        if needs_arguments(optimizer.step):
            raise TypeError(
                f"{self.line_of('build_optimizer')}: build_optimizer() returned {describe_kind(optimizer)}, whose "
                "step() needs a closure that computes the loss several times, and Shoal computes it once for each "
                "step. Return an optimizer whose step() needs none."
            )
        return optimizer

    @property
    def has_optimizer(self) -> bool:
        """True if the task defines an optimizer of its own."""
        return getattr(self._task, "build_optimizer", None) is not None

    @property
    def elementwise_optimizer(self) -> bool | None:
        """What the task says of its optimizer; None means nothing."""
        declared = getattr(self._task, "elementwise_optimizer", None)
        return None if declared is None else bool(declared)

    @property
    def initial_weights(self) -> str | None:
        """Final once a model has been built."""
        return getattr(self._task, "initial_weights", None)

    @property
    def reloads_frozen(self) -> bool:
        """True if frozen parameters are read from `initial_weights` whenever the model is built, and never saved. Final
        once a model has been built."""
        return bool(getattr(self._task, "reloads_frozen", False)) and self.initial_weights is not None

    @property
    def has_deferred_init(self) -> bool:
        return bool(getattr(self._task, "deferred_init", False))

    def shard_units(self, model: nn.Module) -> Sequence[nn.Module]:
        choose = getattr(self._task, "shard_units", None)
        units = default_shard_units(model) if choose is None else choose(model)
        unit_classes = list(units) if isinstance(units, Iterable) else []
        if not isinstance(units, Iterable) or not all(isinstance(unit, nn.Module) for unit in unit_classes):
            raise TypeError(
                f"{self.line_of('shard_units')}: shard_units() returned {describe_kind(units)}, not a list of modules. "
                "Return the blocks of the model whose parameters are gathered together."
            )
        return unit_classes


def load_task(spec: JobSpec) -> LoadedTask:
    """Import the class that `spec.task` names and construct it. Raises whatever the import or the class raises."""
    module_name, _, class_name = spec.task.partition(":")
    module = _imported(module_name, spec)
    try:
        task_class = getattr(module, class_name)
    except AttributeError:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        known = ", ".join(classes[:_SHOWN_CLASSES]) + (", ..." if len(classes) > _SHOWN_CLASSES else "") or "none"
        raise AttributeError(
            f"task {spec.task!r}: {module_name} has no {class_name!r}. Classes there: {known}."
        ) from None
    if not isinstance(task_class, type):
        raise TypeError(
            f"task {spec.task!r}: {class_name} ({place_of(task_class)}) is {describe_kind(task_class)}, not a class. "
            "Name a class with build_model(), build_dataset() and loss(). A program that trains by itself is a script: "
            "shoal submit train.py, see docs/porting.md."
        )
    refuse_constructor(task_class)
    task = task_class(model=spec.model, data=spec.data, seed=spec.seed)
    missing = [name for name in REQUIRED if getattr(task, name, None) is None]
    if missing:
        raise TypeError(
            f"task {spec.task!r} lacks {' and '.join(f'{name}()' for name in missing)}. A task is a class that builds "
            "its model and its data and computes a loss; Shoal runs the training loop. A program with a loop of its "
            "own is a script: shoal submit train.py, see docs/porting.md."
        )
    refuse_methods(task)
    lacking = [name for name in ("embed", "batch_loss") if getattr(task, name, None) is None]
    if len(lacking) == 1:
        raise TypeError(
            f"task {spec.task!r} lacks {lacking[0]}(): a loss of the whole batch needs embed(model, batch) and "
            "batch_loss(*embeddings). See docs/tasks.md."
        )
    return LoadedTask(task, spec)


def _imported(name: str, spec: JobSpec) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        where = f"in {spec.code.working_dir}" if spec.code.working_dir else "and code.working_dir is not set"
        where = "in the uploaded code" if spec.code.archive else where
        raise ModuleNotFoundError(
            f"task {spec.task!r}: there is no module {error.name!r} {where}. Set code.working_dir to the directory "
            "that contains it.",
            name=error.name,
        ) from None


REQUIRED = ("build_model", "build_dataset", "loss")
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "build_model": (),
    "build_dataset": ("split",),
    "loss": ("model", "batch"),
    "training_step": ("model", "batch", "optimizers"),
    "embed": ("model", "batch"),
    "prepare": ("progress",),
    "build_optimizer": ("model", "settings"),
    "collate": ("samples",),
    "shard_units": ("model",),
    "export_config": ("model",),
}
"""What each method is called with, besides `self`; all are given by position."""


def refuse_constructor(task_class: type) -> None:
    """TypeError: the class cannot be constructed as Shoal does it."""
    error = _misfit(task_class, model={}, data={}, seed=0)
    if error is not None:
        constructor: Any = vars(task_class).get("__init__")
        where = f" ({place_of(constructor)})" if hasattr(constructor, "__code__") else ""
        name = task_class.__name__
        raise TypeError(
            f"{name}{where} cannot be constructed as {name}(model=..., data=..., seed=...): {error}. "
            "Write def __init__(self, model, data, seed)."
        )


def refuse_methods(task: object) -> None:
    """TypeError: a method of the task cannot be called as Shoal calls it. Members that it lacks are passed over."""
    for name, parameters in _PARAMETERS.items():
        method: Any = getattr(task, name, None)
        if method is None:
            continue
        call = f"{name}({', '.join(parameters)})"
        expected = f"def {name}({', '.join(('self', *parameters))})"
        if not callable(method):
            raise TypeError(f"{type(task).__name__}.{name} is {method!r}, and Shoal calls {call}. Write {expected}.")
        error = _misfit(method, *parameters)
        if error is not None:
            where = f"{place_of(method)} in {name}()" if hasattr(method, "__code__") else type(task).__name__
            raise TypeError(
                f"{where}: Shoal calls {call}, and the method does not accept that: {error}. Write {expected}."
            )


def needs_arguments(method: Callable[..., Any]) -> bool:
    """Return whether it certainly cannot be called without arguments. What a wrapper wraps counts: torch wraps
    `step`."""
    try:
        inspect.signature(method).bind()
    except ValueError:
        return False
    except TypeError:
        return True
    return False


def _misfit(function: Callable[..., Any], *args: object, **kwargs: object) -> TypeError | None:
    """Why it cannot be called so; None also if nothing is known of it."""
    try:
        # what a decorator's wrapper takes, not what it wraps: it may add arguments
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        try:
            signature = inspect.signature(function)  # functools.cache and others that are written in C
        except (ValueError, TypeError):
            return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None
