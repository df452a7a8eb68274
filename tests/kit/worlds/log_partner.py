"""A rank with a few parameters that trains with the built-in AdamW and logs its gradients: what the engine does.

The tests of the log compare what the buddy replays with what this rank has. Gradients are drawn from the step's number.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.contract.snapshots import SnapshotServer
from shoal_workers.engine.step.double_buffered_adamw import DoubleBufferedAdamW, settings_of
from shoal_workers.snapshot_store.log.records import Commit, CommitBlob, LoggedGroup, encode, head_of
from shoal_workers.snapshot_store.slots.slot_files import Stamp
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.log_stream import LogSender

SHAPES = {"embed": (29, 21), "up.weight": (63, 21), "up.bias": (63,), "idle": (7, 3), "odd": (1,)}


def nothing() -> None:
    pass


class LogPartner:
    """Rank `rank` of a world of one. `step` trains one step; its state after every step is kept in `states`."""

    def __init__(self, store: SnapshotStore, *, rank: int = 0, generation: int = 1, scale: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.store = store
        self.stamp = Stamp(generation, rank, 1, 0)
        self.scale = scale
        self.clip_norm = 5.0
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
        }
        self.running = torch.zeros(5)
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters.values() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.3},
        ]
        self.optimizer = DoubleBufferedAdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8, foreach=True)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.number = 1
        self.previous = 1
        self.states: dict[int, dict[str, Tensor]] = {}
        self.log: LogSender | None = None

    def state(self) -> dict[str, Tensor]:
        state = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optim.{name}.{key}"] = value
        return {**state, "model.running": self.running}

    def open(self, buddy: SnapshotServer, *, copies: bool = True) -> LogSender:
        """Begins a log after the current step, and sends a whole copy."""
        self.states[self.number] = {name: tensor.clone() for name, tensor in self.state().items()}
        numbers = {id(p): index for index, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self.head = head_of(
            [_settings(group) for group in self.optimizer.param_groups],
            [(name, numbers[id(p)], p.shape) for name, p in self.parameters.items()],
            commit_room=8192,
        )
        stamp = Stamp(self.stamp.generation, self.stamp.rank, self.stamp.world_size, self.number)
        self.log = self.store.open_log(buddy, stamp, self.head)
        if copies:
            self.copy(buddy)
        return self.log

    def copy(self, buddy: SnapshotServer) -> None:
        """Sends a whole copy of the current state, and waits until it has arrived."""
        self.store.snapshot(
            self.state(),
            generation=self.stamp.generation,
            rank=self.stamp.rank,
            world_size=self.stamp.world_size,
            step=self.number,
            extra={"step": self.number},
            owns_replicated=True,
        )
        assert self.store.replicate(buddy)
        deadline = time.monotonic() + 60.0
        while self.store.is_sending:
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)

    def append(self, *, is_bf16: bool = False, unused: Collection[str] = ()) -> None:
        """The gradients of the next step, and the first half of its entry. `unused`: parameters that turn out to be
        used by no rank once zeros have been sent for them."""
        assert self.log is not None
        generator = torch.Generator().manual_seed(1000 * self.stamp.rank + self.number)
        for name, parameter in self.parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator) * self.scale
            gradient = gradient.bfloat16().float() if is_bf16 else gradient
            parameter.grad = None if name == "idle" and self.number % 3 else gradient
            if name in unused:
                parameter.grad = torch.zeros_like(parameter)
        self._is_bf16 = is_bf16
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if is_bf16:
            gradients = [gradient.bfloat16() for gradient in gradients]
        self.log.append(self.number + 1, [g.reshape(-1).view(torch.uint8).numpy().data for g in gradients])
        self.log.wait(nothing, patience_s=60.0)
        self._unused = [number for number, name in enumerate(self.parameters) if name in unused]
        for name in unused:
            self.parameters[name].grad = None

    def skip(self) -> None:
        """The vote refuses the step."""
        assert self.log is not None
        self.log.abort(self.number + 1)
        self.number += 1

    def commit(self, *, lr_factor: float = 0.7) -> None:
        """The vote accepts the step: the second half of its entry, and the update."""
        assert self.log is not None
        present = [p.grad for p in self.parameters.values() if p.grad is not None]
        clip = min(1.0, self.clip_norm / (float(torch.stack([g.norm() for g in present]).norm()) + 1e-6))
        self.running += 1
        for group, peak in zip(self.optimizer.param_groups, (0.02, 0.3), strict=True):
            group["lr"] = peak * lr_factor / self.number
        extra = b'{"step": %d}' % (self.number + 1)
        counts = [0 if p.grad is None else int(self.optimizer.state[p]["step"]) + 1 for p in self.parameters.values()]
        commit = Commit(
            step=self.number + 1,
            previous=self.previous,
            is_bf16=self._is_bf16,
            unscale=1 / self.scale,
            clip=clip,
            lrs=tuple(group["lr"] for group in self.optimizer.param_groups),
            counts=tuple(counts),
            unused=tuple(self._unused),
            changed=(("model.running", self.running.nbytes),),
            extra_bytes=len(extra),
        )
        self.log.commit(self.number + 1, encode(CommitBlob(commit, (self.running.numpy().tobytes(),), extra)))
        for factor in (1 / self.scale, clip):
            if factor != 1.0:
                torch._foreach_mul_(present, factor)
        self.optimizer.step()
        self.number += 1
        self.previous = self.number
        self.states[self.number] = {name: tensor.clone() for name, tensor in self.state().items()}

    def step(self, *, is_bf16: bool = False, unused: Collection[str] = ()) -> None:
        self.append(is_bf16=is_bf16, unused=unused)
        self.commit()

    def wait(self) -> None:
        """Until the buddy has acknowledged the newest step."""
        assert self.log is not None
        self.log.wait(nothing, patience_s=60.0)
        assert not self.log.failure, self.log.failure


def _settings(group: dict[str, Any]) -> LoggedGroup:
    own = settings_of(group)
    return LoggedGroup(beta1=own.beta1, beta2=own.beta2, eps=own.eps, weight_decay=own.weight_decay)
