"""What gradients cost and lose as fp32, bf16 and int8: `make bench-compression`, eight minutes; root.

    python bench/compression.py [--steps 300] [--mbit 200] [--out docs/measured/compression.md]

Runs in a network namespace of its own, so all that its loopback carries is of the job, and a token bucket makes the
link slow. Workers train a built-in language model: two plain replicas, two shards of ZeRO-1, two replicas of two such
shards.

    bytes      of 8 steps: workers are held before and after them, and the loopback's counter is read
    seconds    the fastest of these steps, with the slow link and without
    losses     of a smaller model: the mean of the last 50 steps beside that of fp32, and once with a worker killed
    rounding   to the next number, to the next with error feedback, and at random: a plain loop that plays 4 ranks

The exit status is 0 if the losses of each row differ from those of fp32 by at most TOLERANCE, and if the kill changes
no loss.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

import torch
from torch import Tensor, nn
from torch.nn import functional

from kit.processes.fleet import Fleet, Job, RemoteWorker
from kit.processes.warm import close_shared_zygote
from measurements.machine import describe
from shoal_workers.contract.layout import Layout, ShardLevel, plain
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.tasks.lm import LanguageModel

TOLERANCE = 0.01
"""Largest difference of the mean loss of the last steps, relative."""
_LAST = 50
_FROM, _TO = 4, 12
_SENT = 8
"""Column of /proc/net/dev."""
_INSIDE = "SHOAL_BENCH_NAMESPACE"
_SPEC: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "model": {"dim": 256, "num_layers": 4, "num_heads": 4, "hidden_dim": 768, "seq_len": 32},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"lr": 0.003, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 20},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
}
_SMALL = {"model": {"dim": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 192, "seq_len": 64}}
_SHARDS = Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER)
_HYBRID = Layout(dp_replicate=2, dp_shard=2, shard=ShardLevel.OPTIMIZER)


@dataclass(frozen=True)
class Row:
    name: str
    layout: Layout
    reduction: str


ROWS = (
    Row("plain replicas", plain(2), "fp32"),
    Row("plain replicas", plain(2), "int8"),
    Row("shards", _SHARDS, "fp32"),
    Row("shards", _SHARDS, "bf16"),
    Row("shards", _SHARDS, "int8"),
    Row("replicas of shards", _HYBRID, "fp32"),
    Row("replicas of shards", _HYBRID, "int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not os.environ.get(_INSIDE):
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        bench = _Bench(Path(directory), options.steps)
        try:
            lines, is_passed = bench.table(options.mbit)
        finally:
            bench.close()
    lines += _roundings(options.steps)
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    sys.exit(not is_passed)


class _Bench:
    def __init__(self, root: Path, steps: int) -> None:
        self._root, self._steps, self._num_jobs = root, steps, 0
        self._fleet = Fleet(root / "fleet")
        model = LanguageModel(model=_SPEC["model"], data=_SPEC["data"], seed=0).build_model()
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def close(self) -> None:
        self._fleet.kill_all()
        self._fleet.close()
        close_shared_zygote()

    def table(self, mbit: int) -> tuple[list[str], bool]:
        git = ["git", "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
        machine = "; ".join([*describe().values(), f"load average {os.getloadavg()[0]:.1f} before"])
        losses = {row: self._losses(row) for row in ROWS}
        size = f"{self._num_parameters / 1e6:.2f} million parameters"
        lines = [
            *("# Compressed gradients, measured", ""),
            *(f"Made by `make bench-compression` at {commit.strip()}: {machine}.", ""),
            f"Two workers, or four as replicas of shards, train a language model of {size}, and a smaller",
            "one for the losses.",
            "Bytes are all that a rank sends in a step, also votes and headers. gloo makes a reduce-scatter of two",
            "ranks of an all-reduce, which moves twice as much; the one of int8 is an all-to-all. The link carries",
            f"{mbit} Mbit/s for all ranks together; without it, they share the memory of one machine. A step is the",
            "fastest of 7, since other work was on the machine. *Last* is the mean loss of the last",
            f"{_LAST} of {self._steps} steps.",
            "",
            "| gradients | `reduce_precision` | bytes a step | for each parameter | "
            f"step at {mbit} Mbit/s | step | last | beside fp32 |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        is_passed = True
        for row in ROWS:
            num_bytes, slow_s = self._measure(row, mbit)
            _, fast_s = self._measure(row, None)
            fp32 = next(other for other in ROWS if (other.layout, other.reduction) == (row.layout, "fp32"))
            last, difference = _last(losses[row]), _last(losses[row]) / _last(losses[fp32]) - 1
            is_passed &= abs(difference) <= TOLERANCE
            lines.append(
                f"| {row.name} | {row.reduction} | {num_bytes / 1e6:.2f} MB | {num_bytes / self._num_parameters:.2f} | "
                f"{slow_s:.3f} s | {fast_s:.3f} s | {last:.4f} | {difference:+.2%} |"
            )
        rounded = next(row for row in ROWS if row.reduction == "int8")
        is_same = self._losses(rounded, kill_at=self._steps // 2) == losses[rounded]
        outcome = "the losses of all steps have the same bits" if is_same else "LOSSES DIFFER"
        lines += ["", f"Plain replicas with int8, a worker killed in step {self._steps // 2} and replaced: {outcome}."]
        return lines, is_passed and is_same

    def _losses(self, row: Row, kill_at: int = 0) -> dict[int, float]:
        job = self._job({**_SMALL, "stop": {"steps": self._steps}, "batch": {"global_size": 8, "micro_size": 2}}, row)
        workers = job.workers(row.layout.world_size + (kill_at > 0))
        group, spare = workers[: row.layout.world_size], workers[row.layout.world_size :]
        if kill_at:
            group[1].strike("backward", kill_at, "kill")
            job.start(group, layout=row.layout)
            assert group[1].died()
            group = [group[0], *spare]
            job.finish(group, layout=row.layout, restore_snapshot=job.in_memory(job.interrupt(workers[:1]), group))
        else:
            job.finish(group, layout=row.layout, restore_from=None)
        losses: dict[int, float] = job.losses(group)
        self._fleet.kill_all()
        return losses

    def _measure(self, row: Row, mbit: int | None) -> tuple[float, float]:
        """Return the bytes that a rank sends in a step, and the seconds of the fastest one. `mbit`: of the link; None:
        it is not shaped."""
        job = self._job({"stop": {"steps": _TO + 1}, "snapshot": {"enabled": False}}, row)
        workers = job.workers(row.layout.world_size)
        _shape(mbit)
        try:
            before = self._held(job, workers, row.layout, _FROM)
            after = self._held(job, workers, None, _TO)
            for worker in workers:
                worker.call("go")
            for worker in workers:
                worker.exit()
        finally:
            _shape(None)
        times = [report.step_s for report in job.reported(workers, StepReport) if _FROM + 1 < report.step <= _TO]
        self._fleet.kill_all()
        return (after - before) / (_TO - _FROM) / len(workers), min(times)

    def _held(self, job: Job, workers: list[RemoteWorker], layout: Layout | None, step: int) -> int:
        """What the loopback has carried once all workers are held before the step after `step`."""
        for worker in workers:
            worker.strike("forward", step, "hold")
        if layout is not None:
            job.start(workers, layout=layout, restore_from=None)
        else:
            for worker in workers:
                worker.call("go")
        for worker in workers:
            worker.reached()
        counters = re.search(r"^ *lo:(.*)$", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
        assert counters is not None
        return int(counters.group(1).split()[_SENT])

    def _job(self, changes: dict[str, Any], row: Row) -> Job:
        self._num_jobs += 1
        root, memory = self._root / f"job-{self._num_jobs}", self._root / f"memory-{self._num_jobs}"
        memory.mkdir()
        spec = {**_SPEC, "snapshot": {"budget": 1.0}, "reduce_precision": row.reduction, **changes}
        return Job(self._fleet, {"task": "shoal_workers.tasks.lm:LanguageModel", **spec}, root, memory)


def _shape(mbit: int | None) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    if mbit is not None:
        rate = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rate], check=True)


def _last(losses: dict[int, float]) -> float:
    return mean(loss for step, loss in losses.items() if step > max(losses) - _LAST)


_RANKS, _BLOCK, _VOCABULARY, _LENGTH = 4, 128, 64, 16


def _roundings(steps: int) -> list[str]:
    lines = [
        *("", "## Roundings", ""),
        f"A plain loop that plays {_RANKS} ranks: an embedding and three layers on samples of a Markov chain,",
        f"{steps} steps; blocks of {_BLOCK} numbers. The difference from exact sums is that of the loss, relative.",
        "",
        "| optimizer | rounding | last | largest difference of a step | mean difference of the last 50 |",
        "|---|---|---:|---:|---:|",
    ]
    for optimizer in ("adamw", "sgd"):
        exact = _toy(optimizer, "exact", steps)
        for how in ("bf16", "to the next", "to the next, error feedback", "at random"):
            losses = _toy(optimizer, how, steps)
            differences = ((losses - exact) / exact).abs()
            lines.append(
                f"| {optimizer} | {how} | {losses[-_LAST:].mean():.4f} | {differences.max():.1e} | "
                f"{differences[-_LAST:].mean():.1e} |"
            )
    return lines


def _toy(kind: str, how: str, steps: int) -> Tensor:
    """Losses, of shape (steps,)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(_VOCABULARY, 32), nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128)),
        *(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, _VOCABULARY)),
    )
    parameters = [*model.parameters()]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=3e-3) if kind == "adamw" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    draws, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    chain = (2 * torch.randn(_VOCABULARY, _VOCABULARY, generator=draws)).softmax(1)
    residuals: list[Tensor | float] = [0.0] * (_RANKS + 1)
    losses = []

    def rounded(values: Tensor, rank: int) -> Tensor:
        if how in ("exact", "bf16"):
            return values if how == "exact" else values.bfloat16().float()
        if how == "to the next, error feedback":
            values = values + residuals[rank]
        blocks = functional.pad(values, (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-38)
        steps_ = blocks / scales
        steps_ = (steps_ + torch.rand(steps_.shape, generator=noise)).floor() if how == "at random" else steps_.round()
        sent = (steps_ * scales).flatten()[: values.numel()]
        residuals[rank] = values - sent
        return sent

    for _ in range(steps):
        total, loss_sum = torch.zeros(sum(p.numel() for p in parameters)), 0.0
        for rank in range(_RANKS):
            tokens = torch.randint(_VOCABULARY, (8 * _LENGTH,), generator=draws)
            labels = torch.multinomial(chain[tokens], 1, generator=draws).flatten()
            loss = functional.cross_entropy(model(tokens), labels) / _RANKS
            gradients = torch.autograd.grad(loss, parameters)
            total += rounded(torch.cat([gradient.flatten() for gradient in gradients]), rank)
            loss_sum += loss.item()
        pieces = rounded(total, _RANKS).split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        optimizer.step()
        losses.append(loss_sum)
    return torch.tensor(losses)


if __name__ == "__main__":
    main()
