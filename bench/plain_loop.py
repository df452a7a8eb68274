"""The baselines: an ordinary training loop under torchrun with FSDP2, or with DDP, as a user writes it without Shoal.

Model class, data set, global batch, micro-batches, optimizer and clipping are those of the spec. The loop has no votes,
no reports and no checkpoints. It uses a GPU if the spec requests one, with the spec's precision and compiled blocks.
Rank 0 prints one line of JSON with the seconds of every step. bench/overhead.py and bench/gpu.py run it; the peers of
bench/recovery train the same loop and add checkpoints.

    torchrun --nproc-per-node 2 bench/plain_loop.py spec.yaml [--ddp]
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.spec import JobSpec, Precision
from shoal_workers.engine.schedule import compute_lr_factor
from shoal_workers.tasks.lm import LanguageModel


class PlainLoop:
    """Model, optimizer and data of one rank; the process group exists already."""

    def __init__(self, spec: JobSpec, *, is_ddp: bool = False) -> None:
        self.spec = spec
        assert spec.stop is not None
        self.num_steps = spec.stop.steps or 0
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._local, self._micro_size = _shares(spec, self._world_size)
        self._task = LanguageModel(model=spec.model, data=spec.data, seed=spec.seed)
        self._task.prepare(lambda _: None)
        self._data = self._task.build_dataset("train")
        torch.manual_seed(spec.seed)
        self._device = torch.device("cuda" if spec.worker.gpus else "cpu")
        self.model = self._task.build_model().to(self._device)
        if is_ddp:
            self.model = DistributedDataParallel(self.model)
        else:
            self._shard()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=spec.optimizer.lr,
            weight_decay=spec.optimizer.weight_decay,
            fused=True if spec.worker.gpus else None,
        )
        self._order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(spec.seed)).tolist()

    def _shard(self) -> None:
        spec, policy = self.spec, MixedPrecisionPolicy()
        if spec.precision is Precision.BF16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in self._task.shard_units(self.model):
            if spec.compile:
                unit.compile()
            fully_shard(unit, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)

    def step(self, step: int) -> float:
        """Train on the samples of a step (0, 1, ...); the mean loss over all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.optimizer.lr * compute_lr_factor(self.spec.schedule, step, self.num_steps)
        local = self._local
        total = torch.zeros((), device=self._device)
        for index in range(local):
            batch = self._micro_batch(step, self._rank * local + index)
            with self._synchronised(is_last=index == local - 1):
                loss = self._task.loss(self.model, batch) / local
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self._world_size

    def _synchronised(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are added up over ranks with the last micro-batch only."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if is_last else self.model.no_sync()
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def _micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor]:
        first = step * self.spec.batch.global_size + index * self._micro_size
        chosen = range(first, first + self._micro_size)
        batch = self._task.collate([self._data[self._order[i % len(self._order)]] for i in chosen])
        return {name: tensor.to(self._device) for name, tensor in batch.items()}


def _shares(spec: JobSpec, world_size: int) -> tuple[int, int]:
    """Micro-batches per rank and samples in each. If the micro-batches do not divide evenly, a rank has one of all its
    samples."""
    if spec.batch.num_micro_batches % world_size == 0:
        return spec.batch.num_micro_batches // world_size, spec.batch.micro_size
    if spec.batch.global_size % world_size:
        raise SystemExit(f"batch.global_size {spec.batch.global_size} does not divide among {world_size} processes")
    return 1, spec.batch.global_size // world_size


def main() -> None:
    torch.set_num_threads(1)
    spec = parse_spec(yaml.safe_load(Path(sys.argv[1]).read_text()))
    if spec.worker.gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if spec.worker.gpus else "gloo")
    loop = PlainLoop(spec, is_ddp="--ddp" in sys.argv[2:])
    step_s: list[float] = []
    loss = 0.0
    last = time.perf_counter()
    for step in range(loop.num_steps):
        loss = loop.step(step)
        now = time.perf_counter()
        step_s.append(now - last)
        last = now
    if dist.get_rank() == 0:
        print(json.dumps({"step_s": step_s, "last_loss": loss, "pid": os.getpid()}))
    # FSDP's modules are in cycles and hold their groups. A group that is freed as the interpreter ends may abort it.
    del loop
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
