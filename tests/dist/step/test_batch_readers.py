"""Processes that read a task's samples ahead (batch.num_workers): the same losses, each sample once, nothing left.

`read_ahead_tasks` writes a line for each sample that is read, with the process that has read it.
"""

from __future__ import annotations

import os
import select
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kit.processes.os_processes import is_alive
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind, WorkerExit
from shoal_workers.contract.worker_reports import ValidationReport

STEPS = 6
SPEC: dict[str, Any] = {
    "task": "read_ahead_tasks:Augmented",
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 7, "every_steps": 3},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1e-6},
    "seed": 5,
    "deterministic": True,
}
AHEAD = {**SPEC["batch"], "num_workers": 2}


def _spec(tmp_path: Path, name: str, *, ahead: bool, **changes: Any) -> dict[str, Any]:
    spec = {**SPEC, "data": {"ledger": str(tmp_path / f"{name}.txt")}, **changes}
    return {**spec, "batch": AHEAD} if ahead else spec


def _finished(ends: list[WorkerExit]) -> None:
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * len(ends), [end.error for end in ends]


def _run(make_job: Any, spec: dict[str, Any], layout: Layout, root: str) -> tuple[dict[int, float], list[float], Any]:
    job = make_job(root, **spec)
    workers = job.workers(layout.world_size)
    _finished(job.run(workers, layout=layout))
    return job.losses(workers), [one.loss for one in job.reported(workers, ValidationReport)], workers


def _remarks(job: Any, worker: Any) -> list[str]:
    """Trains to the end; what is said of reading ahead."""
    job.start([worker])
    _finished([worker.exit()])
    logs = worker.new_logs()
    job.commit([worker])
    return [line.text for line in logs if "batch.num_workers" in line.text]


def _read(ledger: Path) -> list[tuple[int, int]]:
    """Process and sample of each read."""
    return [(int(pid), int(index)) for pid, index in (line.split() for line in ledger.read_text().splitlines())]


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize(
    ("layout", "task", "changes"),
    [
        (fully_sharded(2), "read_ahead_tasks:Augmented", {}),
        (fully_sharded(3), "read_ahead_tasks:Plain", {}),
        (
            Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, shard=ShardLevel.OPTIMIZER),
            "metered_tasks:Staged",
            {
                "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
                "data": {},
                "deterministic": False,
            },
        ),
        (fully_sharded(2), "contrastive_tasks:Clip", {"data": {}, "validation": {"samples": 0}}),
    ],
    ids=["fsdp2", "fsdp3", "pp2", "batch-loss"],
)
def test_losses_are_the_same_bit_for_bit(
    make_job: Any, tmp_path: Path, layout: Layout, task: str, changes: dict[str, Any]
) -> None:
    """Also if samples and model draw from the same random numbers."""
    plain = _run(make_job, _spec(tmp_path, "plain", ahead=False, task=task, **changes), layout, "plain")
    ahead = _run(make_job, _spec(tmp_path, "ahead", ahead=True, task=task, **changes), layout, "ahead")
    assert ahead[:2] == plain[:2]
    assert len(plain[0]) == STEPS


def test_only_the_readers_read_and_each_sample_of_a_step_once(make_job: Any, tmp_path: Path) -> None:
    spec = _spec(
        tmp_path, "ledger", ahead=True, validation={"samples": 0}, data={"ledger": str(tmp_path / "l"), "length": 48}
    )
    _, _, workers = _run(make_job, spec, fully_sharded(2), "job")
    read = _read(tmp_path / "l")
    by_ranks = [(pid, index) for pid, index in read if pid in {worker.pid for worker in workers}]
    assert {index for _, index in by_ranks} <= set(range(48))
    assert len({index for _, index in by_ranks}) <= 2 * 2 * 2, "more than the proof's steps, micro-batches, samples"
    read = [one for one in read if one not in by_ranks]
    assert len({pid for pid, _ in read}) == 4
    counts = Counter(index for _, index in read)
    # 6 steps of 8 samples are one epoch of 48; what was read ahead beyond the last step may be there too
    assert all(counts[index] >= 1 for index in range(48))
    assert sum(counts.values()) <= 48 + 2 * 2 * 2 * 2  # ranks, processes, prefetch_factor, samples


def test_a_death_and_another_size_change_nothing(make_job: Any, tmp_path: Path) -> None:
    """The survivor's processes serve the next group, too."""
    plain = _run(make_job, _spec(tmp_path, "plain", ahead=False), fully_sharded(2), "plain")
    job = make_job("ahead", memory=True, **_spec(tmp_path, "ahead", ahead=True))
    survivor, source = job.lose_one_of_two("forward", 3)
    before = _children(survivor.pid)
    group = [survivor, *job.workers(2)]
    _finished(job.run(group, restore_snapshot=source))
    assert job.losses(group) == plain[0]
    assert len(before) == 2
    assert _children(survivor.pid) == before


def test_readers_end_with_their_worker(make_job: Any, tmp_path: Path) -> None:
    """Also if it is killed while they read."""
    job = make_job(**_spec(tmp_path, "ledger", ahead=True))
    [worker] = job.workers(1)
    worker.strike("forward", 2, "hold")
    job.start([worker])
    worker.reached()
    readers = _children(worker.pid)
    assert len(readers) == 2
    descriptors = [os.pidfd_open(pid) for pid in readers]
    worker.kill(signal.SIGKILL)
    assert worker.died()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60)[0], "a reader has outlived its worker"
        os.close(descriptor)
    assert not any(is_alive(pid) for pid in readers)


def test_a_reader_that_is_killed_costs_no_step(make_job: Any, tmp_path: Path) -> None:
    changes = {"stop": {"steps": 7}}
    spec = _spec(tmp_path, "plain", ahead=False, task="tiny_tasks:Counting", **changes)
    plain = _run(make_job, spec, fully_sharded(1), "plain")
    data = {"marker": str(tmp_path / "marker"), "bad": 7}
    spec = _spec(tmp_path, "ahead", ahead=True, task="read_ahead_tasks:DyingReader", data=data, **changes)
    job = make_job("ahead", **spec)
    [worker] = job.workers(1)
    [remark] = _remarks(job, worker)
    assert (tmp_path / "marker").exists()
    assert job.losses([worker]) == plain[0]
    assert "has ended with signal 9" in remark
    assert "1 of them read on" in remark


def test_a_sample_that_raises_ends_the_job_with_its_line_and_its_index(make_job: Any, tmp_path: Path) -> None:
    spec = _spec(tmp_path, "x", ahead=True, task="read_ahead_tasks:Failing", data={"bad": 11}, stop={"steps": 8})
    job = make_job(**spec)
    [worker] = job.workers(1)
    [end] = job.run([worker])
    assert end.kind is ExitKind.USER_ERROR
    assert end.error is not None
    assert "no picture 11" in end.error.message
    assert end.error.line.startswith("read_ahead_tasks.py:")
    assert "in __getitem__()" in end.error.line
    assert "Raised by sample 11 of 50." in end.error.traceback
    assert "raise ValueError" in end.error.traceback


@pytest.mark.parametrize("task", ["LateCollate", "Unsendable"])
def test_what_only_the_training_thread_can_make_is_made_there(make_job: Any, tmp_path: Path, task: str) -> None:
    """With a remark, once."""
    plain = _run(make_job, _spec(tmp_path, "plain", ahead=False, task="tiny_tasks:Counting"), fully_sharded(1), "plain")
    job = make_job("ahead", **_spec(tmp_path, "ahead", ahead=True, task=f"read_ahead_tasks:{task}"))
    [worker] = job.workers(1)
    remarks = _remarks(job, worker)
    assert job.losses([worker]) == plain[0]
    assert remarks
    assert all("The training thread reads it instead" in remark for remark in remarks)
    assert len(remarks) <= 2  # of the training, and of the validation


def test_a_reader_holds_no_copy_of_the_model(make_job: Any, tmp_path: Path) -> None:
    """Each step writes to all 64 MiB of the parameters, and to twice as much of AdamW."""
    job = make_job(
        **_spec(tmp_path, "x", ahead=True, task="read_ahead_tasks:Large", stop={"steps": 3}, validation={"samples": 0})
    )
    [worker] = job.workers(1)
    worker.strike("forward", 2, "hold")
    job.start([worker])
    worker.reached()
    readers = _children(worker.pid)
    private = [_private_bytes(pid) for pid in readers]
    worker.call("go")
    _finished([worker.exit()])
    assert len(readers) == 2
    assert max(private) < 32 << 20


def _private_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def test_steps_that_are_skipped_and_micro_batches_that_are_replayed_change_nothing(
    make_job: Any, tmp_path: Path
) -> None:
    """A replay reads micro-batches of other ranks before the step; a skipped step has been read ahead already."""
    found = []
    for name, ahead in (("plain", False), ("ahead", True)):
        spec = _spec(tmp_path, name, ahead=ahead, health={"replay_every_steps": 2})
        job = make_job(name, **spec)
        workers = job.workers(3)
        _finished(job.run(workers, layout=fully_sharded(3), skip_steps=(4,)))
        found.append(job.losses(workers))
    assert found[1] == found[0]
    assert sorted(found[0]) == [1, 2, 3, 5, 6]
