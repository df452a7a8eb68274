"""The gradient log of one generation: what this rank sends to its buddy in each step, between two whole copies.

    backward | append: gradients, raw | wait: the buddy has them | vote | commit: the factors | update

No rank enters a vote before its buddy has the gradients of this step and the commit of the one before. The commit
leaves before the update. So when a step is complete on every rank, every buddy can repeat it, unless a rank dies
between the vote and its commit, about a millisecond: then the group goes back by this one step.

Works on a CPU for the built-in AdamW, and for an optimizer of the task that is pure and elementwise: the buddy must
replay the same operations. If the log breaks, training goes on without it, and the next whole copy begins another one.
Made by the state that it logs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import SavePlan, local_tensor
from shoal_workers.contract.spec import Precision
from shoal_workers.engine.state.device_state import Factors, why_no_log
from shoal_workers.engine.state.training_state import StateView
from shoal_workers.engine.step.double_buffered_adamw import settings_of
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.update import Update
from shoal_workers.snapshot_store.log.records import Commit, CommitBlob, LoggedGroup, LogHead, encode, head_of
from shoal_workers.snapshot_store.log.rules import names_of
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.log_stream import LogSender
from shoal_workers.torch_internals import local_of

_PATIENCE_S = 3.0
"""Longest wait for the buddy in a step; then the log is broken."""
_COMMIT_ROOM_BYTES = 64 << 10
_COUNTER_BYTES = 32


@dataclass(slots=True)
class _Logged:
    """One parameter of the log."""

    own: nn.Parameter
    """The optimizer's."""
    parameter: Tensor
    """The model's."""
    count: int
    """The number of its updates so far; with an optimizer of the task, since the log began."""
    counters: dict[str, Tensor]
    """The single numbers in its optimizer state, by key. None for the built-in AdamW."""

    def gradient(self) -> Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else local_tensor(gradient)


@dataclass(frozen=True, slots=True)
class _ParameterState:
    names: tuple[str, ...]
    """The names of the parameter, and of its optimizer state of the same shape."""
    count: int
    counters: dict[str, Tensor]


class _Broken(Exception):
    """This step cannot be logged; the message says why."""


class GradientLog:
    """Training thread only. All methods do nothing while no log is open."""

    def __init__(self, generation: Generation, store: SnapshotStore | None, view: StateView, update: Update) -> None:
        self._generation = generation
        self._store = store
        self._view = view
        self._update = update
        self._impossible = why_no_log(generation, store, update)
        self._why_broken = ""
        self._owns_nothing = generation.assignment.is_covered
        self._log: LogSender | None = None
        self._head: LogHead | None = None
        self._parameters: list[_Logged] = []
        self._unlogged: list[Tensor] = []
        self._others: dict[str, Tensor] = {}
        """Other tensors of the part that may change, with the values that the buddy knows."""
        self._frozen: dict[str, tuple[Tensor, int]] = {}
        """Parameters without an optimizer, each with torch's count of its changes when the log began. The buddy's copy
        has them, and a step sends nothing of them."""
        self._changing: set[str] = set()
        """Such parameters that the task's code has changed nevertheless."""
        self._previous = 0
        self._pending: int | None = None
        """Step of the entry that waits for its commit."""
        self._is_bf16 = generation.spec.reduce_precision is Precision.BF16
        self._entry_is_bf16 = False
        self._present: list[_Logged] = []
        self._cpu_s = 0.0

    def reason(self, arrived_step: float) -> str:
        """Why no log is in force; empty: one is. `arrived_step`: of the newest whole copy at the buddy."""
        if self._impossible or self._owns_nothing:
            return self._impossible
        if self._log is None:
            return self._why_broken or "no whole copy has been sent yet"
        if self._log.failure:
            return self._log.failure
        return "" if arrived_step >= self._log.start_step else "the first whole copy is on its way"

    @property
    def is_open(self) -> bool:
        return self._open_log() is not None

    def lag(self, step: int) -> int:
        """The number of the `step` completed steps that the buddy cannot replay yet, if a log is in force."""
        if self._log is None or self._log.acknowledged >= self._previous:
            return 0
        return step - self._log.acknowledged

    def begin(self, step: int, plan: SavePlan) -> None:
        """Begins a log, unless one is open, beside a whole copy of the state after `step`. `plan`: the copy's."""
        if self._impossible or (self._log is not None and not self._log.failure) or self._owns_nothing:
            return
        assert self._store is not None
        assignment = self._generation.assignment
        assert assignment.buddy is not None
        try:
            head = self._prepare(plan)
        except _Broken as error:
            self._why_broken = str(error)
            return
        if head is None:
            self._owns_nothing = True
            return
        self._head, self._previous, self._pending = head, step, None
        stamp = Stamp(assignment.generation, assignment.shard, assignment.num_shards, step)
        self._log = self._store.open_log(assignment.buddy, stamp, head)

    def append(self, step: int) -> None:
        """Sends the gradients of the update to `step`. Called after the backward pass, before the vote."""
        log = self._open_log()
        if log is None or self._head is None:
            return
        start_s = time.thread_time()
        try:
            parts = self._parts_to_send()
        except _Broken as error:
            self._break(str(error))
            return
        log.append(step, parts)
        self._pending = step
        self._cpu_s += time.thread_time() - start_s

    def wait(self) -> None:
        """Waits, before the vote, until the buddy has all that was logged or the log is broken."""
        if self._log is not None:
            self._log.wait(self._generation.check, patience_s=_PATIENCE_S)

    def commit(self, step: int, factors: Factors, extra_json: bytes) -> None:
        """Right after the vote, before the update: what the buddy needs to repeat it.

        Everything else that the step changes must have changed already. A parameter that no rank has used has no
        gradient any more: its zeros have been sent, and the commit says that it is not updated.
        """
        log = self._open_log()
        if log is None or self._pending != step:
            return
        if any(parameter.grad is not None for parameter in self._unlogged):
            # Its optimizer state begins, for which the buddy's copy has no room; the next whole copy has.
            self._break("a parameter has its first gradient")
            return
        if moved := {name for name, (entry, count) in self._frozen.items() if _num_changes(entry) != count}:
            self._changing |= moved
            self._break(f"{min(moved)} has changed, although the optimizer does not have it")
            return
        start_s = time.thread_time()
        present = {id(logged) for logged in self._present if logged.parameter.grad is not None}
        sent = set(map(id, self._present))
        for logged in self._present:
            logged.count += id(logged) in present
        changed = self._changed()
        commit = Commit(
            step=step,
            previous=self._previous,
            is_bf16=self._entry_is_bf16,
            unscale=factors.unscale,
            clip=factors.clip,
            lrs=tuple(group["initial_lr"] * factors.lr for group in self._update.optimizer.param_groups),
            counters=self._counter_values(),
            counts=tuple(logged.count if id(logged) in present else 0 for logged in self._parameters),
            unused=tuple(
                number
                for number, parameter in enumerate(self._parameters)
                if id(parameter) in sent and id(parameter) not in present
            ),
            changed=tuple((name, len(value)) for name, value in changed),
            extra_bytes=len(extra_json),
        )
        log.commit(step, encode(CommitBlob(commit, tuple(value for _, value in changed), extra_json)))
        self._previous, self._pending = step, None
        self._cpu_s += time.thread_time() - start_s

    def abort(self) -> None:
        """Called when the vote has refused the step: its entry is dropped."""
        log = self._open_log()
        if log is not None and self._pending is not None:
            log.abort(self._pending)
        self._pending = None

    def take_cost(self) -> float:
        """CPU seconds of this rank and its buddy since the last call."""
        cpu_s, self._cpu_s = self._cpu_s, 0.0
        if self._log is not None:
            cpu_s += self._log.take_cost()
        return cpu_s

    def _open_log(self) -> LogSender | None:
        return self._log if self._log is not None and not self._log.failure else None

    def _break(self, why: str) -> None:
        assert self._store is not None
        self._why_broken, self._log, self._pending = why, None, None
        self._store.close_log()

    def _prepare(self, plan: SavePlan) -> LogHead | None:
        """Finds what a part of this plan consists of; None if this rank owns no part of the state."""
        if not plan.items:
            return None
        items = {item.fqn: item for item in plan.items}
        optimizer = self._update.optimizer
        self._parameters, self._unlogged = [], []
        rows: list[tuple[str, int, tuple[int, ...]]] = []
        known: set[str] = set()
        for index, name, local_parameter, parameter in self._update.named_parameters():
            parameters = self._state_of(name, local_parameter)
            if parameters is None or any(member not in items for member in parameters.names):
                if f"model.{name}" in items:
                    self._unlogged.append(parameter)
                continue
            if any(items[member].dtype != torch.float32 for member in parameters.names):
                raise _Broken(f"{name} is {items[f'model.{name}'].dtype}; a gradient log needs float32 parameters")
            self._parameters.append(_Logged(local_parameter, parameter, parameters.count, parameters.counters))
            rows.append((name, index, items[f"model.{name}"].sizes))
            known |= {*parameters.names, *(f"optim.{name}.{key}" for key in ("step", *parameters.counters))}
        tensors = self._view.tensors()
        self._frozen = {
            name: (parameter, _num_changes(parameter))
            for own_name, parameter in self._update.frozen_parameters()
            if (name := f"model.{own_name}") in items and name not in self._changing
        }
        known |= self._frozen.keys()
        self._others = {name: local_tensor(tensors[name]).clone() for name in items if name not in known}
        room = _COMMIT_ROOM_BYTES * 2 + sum(tensor.nbytes for tensor in self._others.values())
        logged = self._update.logged
        if logged is not None and any(self._update.changed_settings()):
            raise _Broken("the optimizer's settings change while it trains")
        if logged is None:
            return head_of([_settings(group) for group in optimizer.param_groups], rows, commit_room=room)
        logged = logged.model_copy(update={"counters": self._counter_types()})
        room += _COUNTER_BYTES * len(rows) * len(logged.counters)
        return head_of([], rows, commit_room=room, optimizer=logged)

    def _state_of(self, name: str, local_parameter: nn.Parameter) -> _ParameterState | None:
        """Returns None if it has no optimizer state yet, although others may have."""
        optimizer = self._update.optimizer
        state = optimizer.state.get(local_parameter, {})
        if self._update.logged is None:
            return _ParameterState(names_of(name), int(state["step"]), {}) if state else None
        if not state and any(optimizer.state.values()):
            return None
        if any(not isinstance(value, Tensor) for value in state.values()):
            raise _Broken("the optimizer's state has values that are not tensors")
        shards = [key for key, value in state.items() if value.shape == local_parameter.shape]
        counters = {key: value for key, value in state.items() if key not in shards}
        if any(value.numel() != 1 for value in counters.values()):
            raise _Broken(f"the optimizer's state of {name} has another shape than the parameter")
        return _ParameterState((f"model.{name}", *(f"optim.{name}.{key}" for key in shards)), 0, counters)

    def _counter_types(self) -> tuple[tuple[str, str], ...]:
        kinds = {
            tuple((key, str(value.dtype).removeprefix("torch.")) for key, value in parameter.counters.items())
            for parameter in self._parameters
        }
        if len(kinds) > 1:
            raise _Broken("the optimizer keeps other numbers for some parameters than for others")
        return kinds.pop() if kinds else ()

    def _counter_values(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """Called before the update."""
        state = self._update.optimizer.state
        keys = self._parameters[0].counters if self._parameters else ()
        return tuple((key, tuple(float(state[parameter.own][key]) for parameter in self._parameters)) for key in keys)

    def _parts_to_send(self) -> list[memoryview]:
        if self._update.logged is not None and any(self._update.changed_settings()):
            raise _Broken("the optimizer's settings change while it trains")
        parts = [
            (parameter, gradient) for parameter in self._parameters if (gradient := parameter.gradient()) is not None
        ]
        self._present = [part for part, _ in parts]
        gradients = [gradient for _, gradient in parts]
        if any(gradient.dtype != torch.float32 or not gradient.is_contiguous() for gradient in gradients):
            raise _Broken("a gradient is not contiguous float32")
        self._entry_is_bf16 = False
        if self._is_bf16:
            # Gradients that were reduced in bf16 are exact in it. From the first ones that are not, all go in fp32.
            short = [gradient.bfloat16() for gradient in gradients]
            self._is_bf16 = all(torch.equal(a.float(), b) for a, b in zip(short, gradients, strict=True))
            if self._is_bf16:
                self._entry_is_bf16, gradients = True, short
        # Views of the gradients, not copies: the buddy has them before the vote, and nothing writes into them until
        # then.
        return [gradient.reshape(-1).view(torch.uint8).numpy().data for gradient in gradients]

    def _changed(self) -> list[tuple[str, bytes]]:
        changed = []
        tensors = self._view.tensors()
        for name, known in self._others.items():
            current = local_tensor(tensors[name])
            if not torch.equal(current, known):
                known.copy_(current)
                changed.append((name, known.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()))
        return changed


def _settings(group: dict[str, object]) -> LoggedGroup:
    settings = settings_of(group)
    return LoggedGroup(beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps, weight_decay=settings.weight_decay)


def _num_changes(parameter: Tensor) -> int:
    """How often operations have changed a parameter in place, as a whole or its local part."""
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    return parameter._version + local._version
