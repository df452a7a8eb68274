"""A profile of a real group: the losses are those of an undisturbed run, and every end leaves the worker usable."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from kit.processes.fleet import PATIENCE_S, RemoteWorker
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.profiles import Category, Profiled, ProfileRequest

SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 8},
    "checkpoint": {"every_steps": None},
}


def _profiled(job: Any, worker: RemoteWorker) -> Profiled:
    """The report, which a thread of the worker sends once the files are written."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := job.reported([worker], Profiled)):
        assert time.monotonic() < deadline, "no report"
    return found[-1]


def _train(job: Any, layout: Layout, *requests: tuple[int, ProfileRequest]) -> list[RemoteWorker]:
    """From the seed to the end. `requests`: ranks, and what is requested of them during step 3."""
    workers = job.workers(layout.world_size)
    workers[0].strike("forward", 2, "hold")
    generation = job.start(workers, layout=layout)
    workers[0].reached()
    for rank, request in requests:
        workers[rank].call("request_profile", generation, request)
    workers[0].call("go")
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * len(workers)
    job.commit(workers)
    return workers


def test_a_profile_changes_no_number_and_its_table_and_files_are_complete(make_job: Any, tmp_path: Path) -> None:
    undisturbed, job = make_job("plain", **SPEC), make_job("job", **SPEC)
    plain = _train(undisturbed, fully_sharded(2))
    workers = _train(job, fully_sharded(2), (1, ProfileRequest(number=1, rank=1, steps=3)))
    assert job.losses(workers) == undisturbed.losses(plain), "the very same bits"
    profiled = _profiled(job, workers[1])
    assert (profiled.error, profiled.note, profiled.rank, profiled.generation) == ("", "", 1, 1)
    steps = [one.step for one in profiled.times]
    assert steps in ([3, 4, 5], [4, 5, 6]), "rank 1 may not have begun step 3 when rank 0 waits in it"
    assert all(0 < one.seconds[Category.COMPUTE] < one.total_s for one in profiled.times)
    assert all(one.seconds[Category.COMMUNICATION] > 0 for one in profiled.times)
    [overlap] = profiled.overlaps
    assert overlap.axis == "all ranks" and overlap.seconds > 0, "torch makes no second group of all ranks"
    assert profiled.held_s > 0 and profiled.peak_bytes is not None and profiled.peak_bytes > 0
    place = tmp_path / "job" / "profiles" / "profile-000001"
    found = {file.name: place / file.name for file in profiled.files}
    assert sorted(found) == ["memory-rank1-g1.json.gz", "trace-rank1-g1.json.gz"]
    assert all(path.stat().st_size == file.bytes for file in profiled.files for path in [place / file.name])
    with gzip.open(found["trace-rank1-g1.json.gz"], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {"aten::mm", "forward", "backward", "optimizer"} <= {event["name"] for event in events}
    phases = [event for event in events if event.get("cat") == "shoal"]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    begin, end = phases[0]["ts"], phases[-1]["ts"] + phases[-1]["dur"]
    inside = [event for event in operations if begin <= event["ts"] <= end]
    assert len(inside) > 0.9 * len(operations), "phases and operations have one clock"
    with gzip.open(found["memory-rank1-g1.json.gz"], "rt") as file:
        timeline = json.load(file)
    assert [step["step"] for step in timeline["steps"]] == steps
    assert max(level for _, level in timeline["devices"][0]["points"]) == profiled.peak_bytes


def test_a_profile_has_the_collectives_of_each_axis(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = _train(job, Layout(dp_replicate=2, dp_shard=2), (0, ProfileRequest(number=1, rank=0, steps=2)))
    profiled = _profiled(job, workers[0])
    overlaps = {one.axis: one for one in profiled.overlaps}
    assert set(overlaps) == {"shards", "dp_replicate", "all ranks"}
    assert all(one.seconds > 0 for one in overlaps.values())
    assert overlaps["dp_replicate"].hidden < 0.5, "a CPU does nothing else while it sums gradients"


def test_a_job_that_ends_first_gives_the_steps_that_there_are(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = _train(job, fully_sharded(1), (0, ProfileRequest(number=1, rank=0, steps=20)))
    profiled = _profiled(job, workers[0])
    assert [one.step for one in profiled.times] == [4, 5, 6, 7, 8]
    assert profiled.note == "the group ended after 5 of 20 steps" and profiled.files


def test_a_killed_rank_drops_the_recording_and_the_survivor_can_be_profiled_again(make_job: Any) -> None:
    job = make_job(memory=True, **{**SPEC, "stop": {"steps": 10}})
    workers = job.workers(2)
    workers[0].strike("forward", 2, "hold")
    workers[1].strike("backward", 5, "kill")
    generation = job.start(workers)
    workers[0].reached()
    workers[0].call("request_profile", generation, ProfileRequest(number=1, rank=0, steps=20))
    workers[0].call("go")
    assert workers[1].died()
    [first] = job.interrupt([workers[0]])
    assert first.kind in (ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED)
    assert job.reported([workers[0]], Profiled) == []
    again = [workers[0], *job.workers(1)]
    again[0].strike("forward", 7, "hold")
    generation = job.start(again, is_recovery=True)
    again[0].reached()
    again[0].call("request_profile", generation - 1, ProfileRequest(number=2, rank=0, steps=1))  # of the lost group
    again[0].call("request_profile", generation, ProfileRequest(number=3, rank=0, steps=1))
    again[0].call("request_profile", generation, ProfileRequest(number=1, rank=0, steps=9))  # repeated: ignored
    again[0].call("go")
    assert [worker.exit().kind for worker in again] == [ExitKind.FINISHED] * 2
    profiled = _profiled(job, again[0])
    assert (profiled.number, profiled.generation, [one.step for one in profiled.times]) == (3, 2, [9])


def test_storage_that_cannot_be_written_loses_the_files_and_not_the_table(make_job: Any, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "profiles").write_text("a file where the directory should be")
    job = make_job(**SPEC)
    workers = _train(job, fully_sharded(1), (0, ProfileRequest(number=1, rank=0, steps=2)))
    profiled = _profiled(job, workers[0])
    assert len(profiled.times) == 2 and profiled.files == ()
    assert profiled.note.startswith("no files: ")
