"""A loop of tests/kit/loops in plain torch: one process, no group, and none of the engine's loops.

    python plain_loop.py FILE STEPS        prints the loss of each step as JSON, then what the loop has logged

It plays the part of `run` with the global batch at once, in its micro-batches one after the other.
"""

import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from shoal_workers.contract.batch_partition import randomness_seed, sample_at, sample_positions
from shoal_workers.engine.loop.run import AFTER_A_PASS
from shoal_workers.engine.randomness import seed_everything

MOST_WORKERS = 4
"""`elasticity.max_workers` of the tests, on which the size of a micro-batch depends."""


@functools.cache
def undisturbed(file: Path, *arguments: str) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """The losses of that process, and what the loop has logged, by step."""
    from kit.processes.warm import warm_python  # as a program, this file has no path to it

    program = [warm_python(), __file__, str(file), *arguments]
    answer = subprocess.run(program, capture_output=True, text=True, check=True)
    losses, logged = (json.loads(line) for line in answer.stdout.splitlines()[-2:])
    return {int(step): loss for step, loss in losses.items()}, {int(step): one for step, one in logged.items()}


class PlainBatch:
    def __init__(self, run, dataset, global_size, size, collate):
        self.run, self.dataset, self.global_size, self.size, self.passes = run, dataset, global_size, size, 0
        self.collate = collate or torch.utils.data.default_collate

    def __iter__(self):
        run, num = self.run, self.global_size // self.size
        first, self.passes, step = self.passes * num, self.passes + 1, run.step
        for micro in range(num):
            run.left, run.micro_weight = num - micro - 1, 0.0
            at = sample_positions(step, micro, global_size=self.global_size, micro_size=self.size)
            items = [self.dataset[sample_at(one, num_samples=len(self.dataset), seed=0)] for one in at]
            seed_everything(randomness_seed(0, step, first + micro))
            yield self.collate(items)


class PlainRun:
    rank, world_size, is_rank_zero, device = 0, 1, True, torch.device("cpu")

    def __init__(self):
        self.step, self.losses, self.metrics, self.loss, self.micro_weight = 0, {}, {}, None, 0.0
        self.sums = [0.0, 0.0]
        self.weight, self.left = 0.0, 0

    def wrap(self, model, *, blocks=None):
        return model

    def track(self, **objects):
        pass

    def untracked(self, *names):
        pass

    def log(self, **metrics):
        self.metrics[self.step + 1] = {name: float(value) for name, value in metrics.items()}

    def gather(self, tensor):
        return tensor

    def agree(self, flag):
        return bool(flag)

    def batches(self, dataset, *, global_size, micro_size=None, num_streams=None):
        if callable(dataset):
            yield from self.streams(dataset, global_size, num_streams)
        for batch in self.global_batches(dataset, global_size=global_size, micro_size=micro_size):
            yield from batch

    def global_batches(self, dataset, *, global_size, micro_size=None, collate=None):
        while True:
            yield PlainBatch(self, dataset, global_size, micro_size or global_size // MOST_WORKERS, collate)

    def streams(self, make, global_size, num_streams):
        streams = [make(number, num_streams) for number in range(num_streams)]
        each, readers = global_size // streams[0].batch_size // num_streams, [iter(stream) for stream in streams]
        while True:
            step = self.step
            for micro, reader in enumerate(reader for reader in readers for _ in range(each)):
                self.left, self.micro_weight = num_streams * each - micro - 1, 0.0
                batch = next(reader)
                seed_everything(randomness_seed(0, step, micro))
                yield batch

    def backward(self, loss, *, weight=1.0):
        (loss * weight).backward()
        self.sums[0] += max(0.0, weight - self.micro_weight)  # several in one micro-batch add up
        self.micro_weight = max(weight, self.micro_weight)
        self.sums[1] += float(loss.detach()) * weight

    def update(self, optimizer, *, clip=None):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not self.sums[0]:  # another optimizer after the same backward passes
            self.sums = [self.weight, self.loss * self.weight]
        self.weight = self.sums[0]
        for parameter in parameters:
            parameter.grad /= self.sums[0]
        torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        self.loss, self.sums, self.micro_weight = self.sums[1] / self.sums[0], [0.0, 0.0], 0.0

    def commit(self, **metrics):
        self.step += 1
        self.losses[self.step] = self.loss

    def steps(self, optimizer, *, clip=None):
        if self.left:
            return False
        for_the_end = randomness_seed(AFTER_A_PASS, self.step, 0)
        seed_everything(for_the_end)
        self.update(optimizer, clip=clip)
        seed_everything(for_the_end)
        self.commit()
        return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, *arguments = sys.argv[1:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    run = PlainRun()
    seed_everything(randomness_seed(0, 0, 0))
    runpy.run_path(path)["train"](run)
    print(json.dumps(run.losses))
    print(json.dumps(run.metrics))
