"""Loops that read by every kind of loader: after kills and changes of size, every step has the samples of the
undisturbed run and its loss, and no process that has read data is left."""

from __future__ import annotations

import os
import select
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed
from shoal_workers.forkserver.orphans import parents

STEPS, GLOBAL_SIZE, SAMPLES = 8, 12, 60
KINDS = ["dataset", "workers", "loader", "weighted", "iterable", "stateful", "streams", "stateful_streams"]


class Trial:
    """A job that reads by one kind of loader, and its ledger."""

    def __init__(self, make_job: Any, directory: Path, kind: str, name: str) -> None:
        self.ledger = directory / f"ledger-{kind}-{name}"
        self.ledger.mkdir()
        self.job = make_job(
            f"{kind}-{name}",
            memory=True,
            task=None,
            loop={"file": "tests/kit/loops/loaders.py", "args": [kind, str(self.ledger)]},
            elasticity={"max_workers": 4},
            snapshot={"budget": 1.0},
        )

    def samples(self) -> dict[int, list[int]]:
        """What was read for each step, by the group that has completed it: the one that has noted it last."""
        notes: dict[int, dict[int, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
        ages: dict[tuple[int, int], float] = defaultdict(float)
        for note in self.ledger.iterdir():
            step, world_size, rank, pid = map(int, note.name.split("."))
            notes[step][world_size][f"{rank} {pid}"] = [int(line) for line in note.read_text().split()]
            ages[step, world_size] = max(ages[step, world_size], note.stat().st_mtime_ns)
        found = {}
        for step, groups in notes.items():
            last = max(groups, key=lambda size: ages[step, size])
            found[step] = sorted(index for own in groups[last].values() for index in set(own))
        return {step: found[step] for step in range(STEPS)}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[dict[int, list[int]], dict[int, float]]]:
    return {}


@pytest.fixture
def trial(make_job: Any, tmp_path: Path, undisturbed: Any) -> Any:
    def make(kind: str) -> tuple[Trial, dict[int, list[int]], dict[int, float]]:
        if kind not in undisturbed:
            alone = Trial(make_job, tmp_path, kind, "alone")
            workers = alone.job.workers(1)
            [end] = alone.job.run(workers, layout=replicated(1))
            assert end.kind is ExitKind.FINISHED, end
            undisturbed[kind] = alone.samples(), alone.job.losses(workers)
        return Trial(make_job, tmp_path, kind, "disturbed"), *undisturbed[kind]

    return make


def children_of(pids: set[int]) -> list[int]:
    return [pid for pid, parent in parents().items() if parent in pids]


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_read_once_and_no_loss_changes_over_a_kill_and_two_changes_of_size(
    trial: Any, kind: str
) -> None:
    disturbed, samples, losses = trial(kind)
    job = disturbed.job
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    source = job.lose(workers, victim, "backward", 2, layout=replicated(3))
    assert children_of({worker.pid for worker in survivors}) == []

    survivors[0].strike("forward", 4, "hold")
    generation = job.start(survivors, layout=replicated(2), restore_snapshot=source)
    survivors[0].reached()
    survivors[0].call("request_yield", generation, False)  # its ballot of this step is not made yet
    survivors[0].call("go")
    exits = [worker.exit() for worker in survivors]
    assert [(e.kind, e.step) for e in exits] == [(ExitKind.YIELDED, 5)] * 2, exits

    larger = survivors + job.workers(2)
    ends = job.run(larger, layout=replicated(4), restore_snapshot=job.in_memory(exits, larger))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 4, ends
    assert [one.start_step for one in job.reported(larger, GroupFormed)] == [0, 2, 5]
    assert children_of({worker.pid for worker in larger}) == []
    assert disturbed.samples() == samples
    assert job.losses(larger) == pytest.approx(losses, abs=3e-7)
    epoch = [index for step in range(SAMPLES // GLOBAL_SIZE) for index in samples[step]]
    assert sorted(epoch) == list(range(SAMPLES))


@pytest.mark.parametrize("kind", ["workers", "stateful"])
def test_processes_that_read_data_die_with_a_killed_rank(trial: Any, kind: str) -> None:
    disturbed, _, _ = trial(kind)
    [worker] = disturbed.job.workers(1)
    worker.strike("forward", 3, "hold")
    disturbed.job.start([worker], layout=replicated(1))
    worker.reached()
    readers = children_of({worker.pid})
    assert len(readers) == 2
    descriptors = [os.pidfd_open(pid) for pid in readers]
    worker.kill()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 5.0)[0], "it lives on"
        os.close(descriptor)


def test_a_stream_that_divides_itself_by_rank_is_refused(trial: Any) -> None:
    disturbed, _, _ = trial("by_rank")
    workers = disturbed.job.workers(2)
    ends = disturbed.job.run(workers, layout=replicated(2))
    assert {e.kind for e in ends} == {ExitKind.USER_ERROR}
    assert {"every rank has to read the same" in str(e.error.message) for e in ends if e.error} == {True}


def test_the_losses_of_all_kinds_of_processes_are_equal(trial: Any) -> None:
    """Reading in another process draws the same random numbers."""
    _, samples, losses = trial("dataset")
    for kind in ("workers", "passes"):
        _, same_samples, same_losses = trial(kind)
        assert (same_samples, same_losses) == (samples, losses)


def test_a_stream_goes_on_after_the_last_step_of_the_job_before(make_job: Any, tmp_path: Path, trial: Any) -> None:
    _, samples, losses = trial("streams")
    workers = []
    for steps in (5, STEPS):
        ledger = tmp_path / f"ledger-{steps}"
        ledger.mkdir()
        job = make_job(
            "continued",
            memory=False,
            task=None,
            loop={"file": "tests/kit/loops/loaders.py", "args": ["streams", str(ledger), str(steps)]},
            elasticity={"max_workers": 4},
        )
        workers = job.workers(2)
        ends = job.run(workers, layout=replicated(2))
        assert [(e.kind, e.step) for e in ends] == [(ExitKind.FINISHED, steps)] * 2, ends
    last = [int(line) for note in ledger.glob("7.*") for line in note.read_text().split()]
    assert sorted(last) == samples[7]
    assert job.losses(workers) == pytest.approx({step: losses[step] for step in (6, 7, 8)}, abs=3e-7)
