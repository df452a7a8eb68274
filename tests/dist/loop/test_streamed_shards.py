"""Samples that are streamed from a slow and unreliable server over kills, resizes and pauses: a ledger of what each
rank has trained on is the order of an undisturbed run, so each sample of an epoch was used exactly once."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.processes.fleet import Job, RemoteWorker
from kit.processes.generated_shards import FAULTS, generated_shards
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.data.streaming.order import BlockOrder, EqualSizes

GLOBAL_SIZE, MOST_WORKERS, SEED = 12, 4, 5
FEW = {"num_shards": 10, "samples": 12, "num_bytes": 2048}
"""Ten steps an epoch, in blocks of four shards; the cache has room for six."""
MANY = {"num_shards": 10**8, "samples": 1220, "num_bytes": 4096}
"""500 TB. The cache has room for ten shards, two and a half blocks."""


@dataclass
class Trial:
    """A job, its generations so far, and what each of their ranks has noted."""

    job: Job
    ledger: Path
    cache: Path
    group: list[RemoteWorker]
    source: SnapshotSource | None = None
    generations: list[tuple[int, list[int]]] = field(default_factory=list)
    """The step that each began with, and the process of each rank."""
    step: int = 0

    def strike(self, kind: str, step: int, draw: random.Random) -> None:
        """Runs a generation until it has completed `step` steps, and ends it in this way."""
        self.generations.append((self.step, [worker.pid for worker in self.group]))
        if kind == "kill":
            victim = draw.choice(self.group)
            victim.strike("backward", step, "kill")
            self._start()
            assert victim.died()
            self.group = [worker for worker in self.group if worker is not victim]
            self.source = self.job.in_memory(self.job.interrupt(self.group), self.group)
            if draw.random() < 0.5:
                self.group += self.job.workers(1)
            self.step = step
            return
        self.group[0].strike("forward", step - 1, "hold")
        generation = self._start()
        self.group[0].reached()
        self.group[0].call("request_yield", generation, kind == "pause")
        self.group[0].call("go")
        exits = [worker.exit() for worker in self.group]
        assert [(one.kind, one.step) for one in exits] == [(ExitKind.YIELDED, step)] * len(exits), exits
        self.step = step
        if kind == "pause":  # nothing is left in memory or on the disk of the node
            self.job.wait_until_committed(self.group, step)
            for worker in self.group:
                worker.kill()
            shutil.rmtree(self.cache)
            self.source = None
            self.group = self.job.workers(draw.randint(1, MOST_WORKERS))
            return
        self.source = self.job.in_memory(exits, self.group)
        if kind == "grow":
            self.group += self.job.workers(draw.randint(1, MOST_WORKERS - len(self.group)))
        else:
            number = draw.randint(1, len(self.group) - 1)
            for worker in self.group[number:]:
                worker.kill()
            self.group = self.group[:number]

    def _start(self) -> int:
        return self.job.start(self.group, layout=replicated(len(self.group)), restore_snapshot=self.source)

    def possible(self) -> list[str]:
        size = len(self.group)
        return ["pause"] + ["kill", "shrink"] * (size > 1) + ["grow"] * (size < MOST_WORKERS)

    def trained_on(self) -> list[int]:
        """The samples of each completed step in the order of the ranks, as the last generation that began before it has
        noted them."""
        found: list[int] = []
        for step in range(self.step):
            start, pids = [one for one in self.generations if one[0] <= step][-1]
            for rank, pid in enumerate(pids):
                note = self.ledger / f"{step}.{start}.{rank}.{pid}"
                found += dict.fromkeys(int(line) for line in note.read_text().split())  # padding is noted twice
        return found


def _incidents(
    make_job: Any, tmp_path: Path, kinds: list[str] | int, shards: dict[str, int], num_workers: int
) -> tuple[list[int], dict[str, int]]:
    """Runs them; returns what was trained on, and what the server says. `kinds`: or how many are drawn."""
    ledger, cache = tmp_path / "ledger", tmp_path / "cache"
    ledger.mkdir()
    draw = random.Random(SEED)
    shard_bytes = shards["samples"] * shards["num_bytes"]
    room = (6 if shards is FEW else 10) * shard_bytes
    with generated_shards(latency_ms=20, throttled=0.05, failing=0.05, cut=0.05) as server:
        settings = {
            "shards": server.pattern(**shards),
            "record_bytes": shards["num_bytes"],
            "block_shards": 4,
            "cache_dir": str(cache),
            "cache_bytes": room,
        }
        job = make_job(
            memory=True,
            task=None,
            loop={"file": "tests/kit/loops/streamed.py", "args": [json.dumps(settings), str(ledger), str(num_workers)]},
            seed=SEED,
            elasticity={"max_workers": MOST_WORKERS},
            snapshot={"budget": 1.0},
        )
        trial = Trial(job, ledger, cache, job.workers(3))
        num = kinds if isinstance(kinds, int) else len(kinds)
        for number in range(num):
            kind = draw.choice(trial.possible()) if isinstance(kinds, int) else kinds[number]
            trial.strike(kind, trial.step + draw.randint(2, 4), draw)
            assert sum(path.stat().st_size for path in cache.glob("*") if path.exists()) <= room
        trial.strike("pause", trial.step + 2, draw)
        return trial.trained_on(), server.statistics()


def _expected(shards: dict[str, int], num: int) -> list[int]:
    order = BlockOrder(EqualSizes(shards["num_shards"], shards["samples"]), 4)
    return order.samples_at(range(num), SEED)


def _check(samples: list[int], statistics: dict[str, int], shards: dict[str, int]) -> None:
    assert samples == _expected(shards, len(samples))
    in_epoch = shards["num_shards"] * shards["samples"]
    for start in range(0, len(samples), in_epoch):
        epoch = samples[start : start + in_epoch]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < in_epoch or sorted(epoch) == list(range(in_epoch))
    assert all(statistics[fault] for fault in FAULTS), statistics


@pytest.mark.cells(2)
@pytest.mark.parametrize(("shards", "num_workers"), [(FEW, 2), (MANY, 0)], ids=["epochs", "500 TB"])
def test_four_incidents_repeat_no_sample_and_leave_none_out(
    make_job: Any, tmp_path: Path, shards: dict[str, int], num_workers: int
) -> None:
    samples, statistics = _incidents(make_job, tmp_path, ["kill", "shrink", "grow", "pause"], shards, num_workers)
    _check(samples, statistics, shards)


@pytest.mark.matrix  # four incidents, of one kind each, are lived through in `make test-slow`
@pytest.mark.parametrize(("shards", "num_workers"), [(FEW, 0), (FEW, 2), (MANY, 0), (MANY, 2)])
def test_twenty_incidents_repeat_no_sample_and_leave_none_out(
    make_job: Any, tmp_path: Path, shards: dict[str, int], num_workers: int
) -> None:
    samples, statistics = _incidents(make_job, tmp_path, 20, shards, num_workers)
    _check(samples, statistics, shards)
    assert len(samples) > 4 * FEW["num_shards"] * FEW["samples"], "several epochs of the small data set"
