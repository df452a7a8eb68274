"""What is right for a drawn loop: its program in one process of plain torch, with a `run` that has none of the engine's
loops; also with gradients that differ in their last bits, to know how far rounding reaches.

Runs in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from kit.fuzz.loops import FILE, row
from kit.fuzz.reference import Reference, Seen, StepBuffers, array
from shoal_workers.contract.batch_partition import randomness_seed, sample_at
from shoal_workers.engine.loop.run import AFTER_A_PASS
from shoal_workers.engine.loop.tracked import Tracked
from shoal_workers.engine.randomness import seed_everything

_NOISE = 3e-7


def reference(choices: dict[str, Any]) -> Reference:
    torch.set_num_threads(1)
    try:
        seen = _train(choices)
    except Exception as error:
        return Reference(Seen(), error=f"{type(error).__name__}: {error}")
    return Reference(seen, tuple(_train(choices, noise=number) for number in (1, 2)))


def _train(choices: dict[str, Any], *, noise: int = 0) -> Seen:
    run, before = _PlainRun(noise), sys.argv
    sys.argv = [str(FILE), json.dumps(choices)]
    seed_everything(randomness_seed(0, 0, 0))
    try:
        runpy.run_path(str(FILE))["train"](run)
    finally:
        sys.argv = before
    run.end_step()
    tensors, _ = Tracked(run.objects).collect()
    names = sorted({name for metrics in run.metrics.values() for name in metrics})
    logged = {f"log {name}": row({s: m[name] for s, m in run.metrics.items() if name in m}) for name in names}
    return Seen(run.losses, run.norms, {}, 0.0, {**{n: array(t) for n, t in tensors.items()}, **logged})


class _Buffers(StepBuffers):
    def apply_mean(self, weight: float) -> None:
        self._change = [one / weight if one.is_floating_point() else one for one in self._change]
        self.apply()


class _PlainRun:
    """A step is complete when the loop asks for the next one."""

    rank, world_size, is_rank_zero, device = 0, 1, True, torch.device("cpu")

    def __init__(self, noise: int) -> None:
        self._noise, self._noises = noise, torch.Generator().manual_seed(noise)
        self.objects: dict[str, Any] = {}
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.loss: float | None = None
        self._norm = 0.0
        self._num_steps, self._is_ended = 0, False
        self._epoch: int | None = None
        self._weight = self._loss_sum = self._micro_weight = 0.0
        self._left, self._is_open = 0, False
        self._buffers: list[_Buffers] | None = None

    @property
    def step(self) -> int:
        return self._num_steps + self._is_ended

    def track(self, **objects: Any) -> None:
        self.objects = objects

    def agree(self, flag: bool) -> bool:
        return bool(flag)

    def log(self, **numbers: float) -> None:
        self.metrics.setdefault(self._num_steps + 1, {}).update(numbers)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        for epoch in range(num_epochs):
            self._epoch = epoch
            yield epoch
            self._epoch = None
            self.end_step()

    def batches(self, data: Any, *, global_size: int | None = None, micro_size: int | None = None) -> Iterator[Any]:
        dataset = data.dataset if isinstance(data, DataLoader) else data
        for pieces in self._steps(data, global_size, micro_size):
            self.end_step()
            yield from _Batch(self, dataset, pieces)

    def global_batches(self, data: Any, *, global_size: int, micro_size: int) -> Iterator[_Batch]:
        for pieces in self._steps(data, global_size, micro_size):
            self.end_step()
            yield _Batch(self, data, pieces)

    def _steps(self, data: Any, global_size: int | None, micro_size: int | None) -> Iterator[list[Sequence[int]]]:
        """The samples of each micro-batch, step after step."""
        epochs = itertools.count() if self._epoch is None else [self._epoch]
        if isinstance(data, DataLoader) and global_size is None:
            for epoch in epochs:
                data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                for batch in list(data.batch_sampler or ()):
                    yield _divided(batch, micro_size or len(batch))
            return
        assert global_size is not None
        pieces: list[Sequence[int]] = []
        size = micro_size if not isinstance(data, DataLoader) else int(data.batch_size or 0)
        assert size
        left: list[int] = []
        for epoch in epochs:
            if isinstance(data, DataLoader):
                data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                pieces += list(data.batch_sampler or ())
            else:
                num = len(data)
                left += [sample_at(epoch * num + index, num_samples=num, seed=0) for index in range(num)]
                end = len(left) if self._epoch is not None else len(left) // size * size
                pieces += _divided(left[:end], size)
                left = left[end:]
            while len(pieces) >= global_size // size or (pieces and self._epoch is not None):
                yield pieces[: global_size // size]
                pieces = pieces[global_size // size :]

    def begin_micro_batch(self, num_left: int) -> None:
        self._end_micro_batch()
        if self._buffers is None:
            self._buffers = [_Buffers(one) for one in self.objects.values() if isinstance(one, nn.Module)]
        for buffers in self._buffers:
            buffers.begin()
        self._left, self._is_open, self._micro_weight = num_left, True, 0.0

    def _end_micro_batch(self) -> None:
        if self._is_open:
            for buffers in self._buffers or ():
                buffers.end(self._micro_weight)
        self._is_open = False

    def backward(self, loss: Tensor, *, weight: float = 1.0) -> None:
        (loss * weight).backward()
        self._weight += max(0.0, weight - self._micro_weight)
        self._micro_weight = max(weight, self._micro_weight)
        self._loss_sum += float(loss.detach()) * weight

    def update(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None) -> None:
        self._end_micro_batch()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            parameter.grad /= self._weight
            if self._noise:
                noise = torch.randn(parameter.shape, generator=self._noises)
                parameter.grad += noise * (_NOISE * parameter.grad.abs().max())
        self._norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
        if clip is not None and self._norm > clip:
            for parameter in parameters:
                parameter.grad *= clip / self._norm
        for buffers in self._buffers or ():
            buffers.apply_mean(self._weight)
        optimizer.step()
        optimizer.zero_grad()
        self.loss = self._loss_sum / self._weight
        self._weight = self._loss_sum = self._micro_weight = 0.0
        self._buffers = None

    def steps(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None) -> bool:
        if self._left:
            return False
        seed_everything(randomness_seed(AFTER_A_PASS, self._num_steps, 0))
        self.update(optimizer, clip=clip)
        self._is_ended = True
        seed_everything(randomness_seed(AFTER_A_PASS, self._num_steps, 0))
        return True

    def commit(self) -> None:
        assert self.loss is not None
        self._num_steps, self._is_ended = self._num_steps + 1, False
        self.losses[self._num_steps], self.norms[self._num_steps] = self.loss, self._norm

    def end_step(self) -> None:
        if self._is_ended:
            self.commit()


class _Batch:
    def __init__(self, run: _PlainRun, dataset: Any, pieces: list[Sequence[int]]) -> None:
        self._run, self._dataset, self._pieces, self._num_passes = run, dataset, pieces, 0

    def __iter__(self) -> Iterator[Any]:
        run, step, num = self._run, self._run.step, len(self._pieces)
        first, self._num_passes = self._num_passes * num, self._num_passes + 1
        for number, piece in enumerate(self._pieces):
            run.begin_micro_batch(num - number - 1)
            items = [self._dataset[index] for index in piece]
            seed_everything(randomness_seed(0, step, first + number))
            yield default_collate(items)
        seed_everything(randomness_seed(AFTER_A_PASS, step, self._num_passes))


def _divided(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[first : first + size] for first in range(0, len(indices), size)]
