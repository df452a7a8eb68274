"""The state of a run as flat names and tensors: the content of a checkpoint. Hides what is a tensor, what is a plain
value, and what need not be saved at all.

    model.<parameter or buffer>           DTensor or Tensor
    optim.<parameter>.<key>               DTensor or Tensor, for example optim.blocks.0.up.weight.exp_avg
    extra                                 small JSON: step, seed, data, changes of its weights, loss scale, plain
                                          optimizer values, last reports

Names are the modules' own, so any world size can read what any other wrote, and nothing depends on a rank. Learning
rate and randomness are pure functions of step and seed, so these two numbers are all that is saved of them.

The reports of the last steps are kept by every rank and in every snapshot (`Recent`), because rank 0 may die before it
sent them. A group that continues from a snapshot does not repeat those steps, so their losses would be missing from the
job's history. The next rank 0, which may be a worker that has never trained, sends them again with `GroupFormed`.

Snapshots are taken after every step. Naming some hundred tensors and laying the optimizer's shards out as DTensors
takes longer than copying them, so `StateView` does it once, and notices if an optimizer or a module replaces a tensor
instead of writing into it. Called by the trainer, by `Snapshots` and by whatever restores.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.contract.mixture_weights import InForce, began, to_json
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.loss_scale import Scaling
from shoal_workers.engine.step.update import Update

_PLAIN = (bool, int, float, str, type(None))


def tensors_of(assembly: Assembly, update: Update) -> dict[str, Tensor]:
    """Returns, by name, every tensor of the run that this rank has a part of. They share the memory of the live
    tensors.

    Tied weights appear once."""
    tensors = {f"model.{name}": value.detach() for name, value in assembly.named_tensors()}
    for name, key, entry in update.state():
        if isinstance(entry, Tensor):
            tensors[f"optim.{name}.{key}"] = entry.detach()
    return tensors


def may_be_absent(update: Update) -> dict[str, str]:
    """Names of the tensors that a source may lack, each with its parameter's: a parameter has no optimizer state before
    its first gradient."""
    return {
        f"optim.{name}.{key}": f"model.{name}"
        for name, key, entry in update.state()
        if isinstance(entry, Tensor) and update.may_lack_state(name)
    }


def grown_state(update: Update, unread: Mapping[str, Shape]) -> list[str]:
    """Make the optimizer's tensors that a source has and that `materialise_state` has not made: an optimizer of a
    user's own may make them in any update. Returns the names that there are now, to be read."""
    made = []
    for name, shape in unread.items():
        if not name.startswith("optim."):
            continue
        parameter, _, key = name.removeprefix("optim.").rpartition(".")
        if update.make_state(parameter, key, shape.sizes, shape.dtype):
            made.append(name)
    return made


class PlainValues:
    """The part of a state that is not a tensor, as snapshots and checkpoints take it. Training thread only."""

    def values(self, step: int) -> dict[str, Any]:
        """JSON values of rank 0."""
        raise NotImplementedError

    def encoded(self, step: int) -> bytes:
        """The same as JSON."""
        return json.dumps(self.values(step), allow_nan=False).encode()

    def encoded_values(self) -> bytes:
        """Returns, as JSON, what ranks other than that of shard 0 save."""
        return b"{}"


class NonTensorState(PlainValues):
    """The part of one generation's state that is not a tensor, as JSON values. Training thread only."""

    def __init__(self, update: Update, seed: int, content_hash: str, recent: Recent, scaling: Scaling) -> None:
        """`content_hash`: of the training data; empty: not known."""
        self._update = update
        self._seed, self._content_hash = seed, content_hash
        self._recent = recent
        self._scaling = scaling
        self.weight_changes: tuple[InForce, ...] = ()
        """Changes of a mixture's weights that hold in this generation; those that took effect are saved."""

    def values(self, step: int) -> dict[str, Any]:
        return {**self._without_reports(step), "reports": self._recent.values()}

    def encoded(self, step: int) -> bytes:
        """The values as JSON, for every step; reports that were encoded for an earlier step are not encoded again."""
        rest = json.dumps(self._without_reports(step))
        return f'{rest[:-1]}, "reports": {self._recent.encoded()}}}'.encode()

    def encoded_values(self) -> bytes:
        """Returns, as JSON, what ranks other than that of shard 0 have to save: the optimizer's values for their
        parameters, which another stage of a pipeline does not have."""
        values = self._update.plain_values()
        return json.dumps({"optimizer_values": values} if values else {}).encode()

    def _without_reports(self, step: int) -> dict[str, Any]:
        values = self._update.plain_values()
        for key, value in values.items():
            if not isinstance(value, _PLAIN):
                raise TypeError(
                    f"optimizer state {key!r} is {type(value).__name__}; only tensors and plain values can be saved."
                )
        changed = self._update.changed_settings()
        extra = {"step": step, "seed": self._seed, "optimizer_values": values, "changed_settings": changed}
        if attributes := self._update.changed_attributes():
            extra["optimizer_attributes"] = attributes
        if self._content_hash:
            extra["data"] = self._content_hash
        if past := began(self.weight_changes, step):
            extra["weight_changes"] = to_json(past)
        scale = self._scaling.to_json()
        return extra if scale is None else {**extra, "loss_scale": scale}


def apply_extra(extra: dict[str, Any], update: Update) -> tuple[int, str]:
    """Restore the plain values after the tensors have been read. Returns the step, and what people should know of the
    optimizer's settings."""
    update.restore_plain_values(extra.get("optimizer_values", {}))
    update.restore_attributes(extra.get("optimizer_attributes", {}))
    return int(extra["step"]), update.restore_settings(extra["changed_settings"])


@dataclass(frozen=True, slots=True)
class _Known:
    identity: tuple[int, ...]
    held: list[Tensor]
    """The tensors whose ids are the identity: an id can be reused once its object is gone."""
    tensors: dict[str, Tensor]


class StateView:
    """The tensors of one model and its optimizer; their memory may alternate between buffers. Training thread only."""

    def __init__(self, assembly: Assembly, update: Update) -> None:
        self._assembly = assembly
        self._update = update
        self._buffer = 0
        self._known: dict[int, _Known] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the same dict as in the last call if its tensors are still the live ones. It shares their memory."""
        live = list(self._live())
        # an assignment to `data` keeps the object and changes its memory
        identity = (*map(id, live), *(tensor.data_ptr() for tensor in live if not isinstance(tensor, DTensor)))
        known = self._known.get(self._buffer)
        if known is None or known.identity != identity:
            known = self._known[self._buffer] = _Known(identity, live, tensors_of(self._assembly, self._update))
        return known.tensors

    def turn_to(self, buffer: int) -> None:
        """Notes that the tensors, still the same objects, lie in the buffer of this number now."""
        self._buffer = buffer

    def forget(self) -> None:
        """Notes that the memory behind all buffer numbers has changed."""
        self._known.clear()

    def _live(self) -> Iterator[Tensor]:
        yield from self._assembly.live_tensors()
        for state in self._update.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield value


_NUM_KEPT = 64
"""More steps than a polling supervisor lags behind. If it was away for longer, the oldest reports are lost."""
_MAX_CHARS = 32_000
"""Longest text of all reports: half of the room that a snapshot has for plain values. With many metrics fewer stay."""


class Recent:
    """Training thread only. A report is encoded once, and not before it is needed."""

    def __init__(self) -> None:
        self._new: deque[StepReport] = deque(maxlen=_NUM_KEPT)
        self._texts: deque[str] = deque(maxlen=_NUM_KEPT)

    def add(self, report: StepReport) -> None:
        self._new.append(report)

    def values(self) -> list[dict[str, Any]]:
        values: list[dict[str, Any]] = json.loads(self.encoded())
        return values

    def encoded(self) -> str:
        """The values as JSON."""
        while self._new:
            self._texts.append(json.dumps(_values(self._new.popleft()), allow_nan=False))
        while sum(map(len, self._texts)) > _MAX_CHARS:
            self._texts.popleft()
        return f"[{', '.join(self._texts)}]"

    @staticmethod
    def parse(values: Iterable[dict[str, Any]]) -> tuple[StepReport, ...]:
        return tuple(StepReport.model_validate(value) for value in values)


def _values(report: StepReport) -> dict[str, Any]:
    return report.model_dump(exclude={"compute_s", "data_s", "cpu_wait_s", "saving_s", "validating_s"})
