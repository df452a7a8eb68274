"""`shoal profile-job` and `shoal profiles`: the table of a step, the files, the failure."""

import threading
from pathlib import Path
from typing import Any

from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.profiles import Category, Overlap, Profiled, ProfileFile, StepTimes

NAME = "trace-rank0-g1.json.gz"
SECONDS = {Category.COMPUTE: 0.15, Category.COMMUNICATION: 0.05}
RESULT = Profiled(
    generation=1,
    number=1,
    rank=0,
    times=(StepTimes(step=41, seconds=SECONDS), StepTimes(step=42, seconds=SECONDS)),
    files=(ProfileFile(name=NAME, bytes=5),),
    peak_bytes=3 << 20,
    overlaps=(Overlap(axis="shards", seconds=0.08, hidden=0.75),),
    held_s=0.03,
)


def _answer(service: Any, job: Any, result: Profiled, directory: Path) -> threading.Thread:
    """Plays the supervisor: waits for the request, then reports its end."""
    place = directory / "checkpoints" / job.id / "profiles" / "profile-000001"
    place.mkdir(parents=True)
    (place / NAME).write_bytes(b"trace")
    requested = threading.Event()
    listening = service.store.subscribe(lambda _: requested.set(), job.id)

    def answer() -> None:
        with listening:
            assert requested.wait(60)
            service.report(job, JobStatus(state=JobState.RUNNING), profiles=(result,))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_profile_is_waited_for_shown_and_written(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job()
    service.begin(job)
    supervisor = _answer(service, job, RESULT, tmp_path)
    ran = shoal("profile-job", job.id, "--steps", "2", "--out", str(tmp_path / "out"))
    supervisor.join()
    assert ran.code == 0, ran.err
    rows = {cells[1]: cells[2:5] for line in ran.out.splitlines() if len(cells := line.split()) > 5}
    assert rows["compute"] == ["150", "ms", "75.0%"]
    assert rows["communication"] == ["50", "ms", "25.0%"]
    assert "steps 41 to 42, 200 ms each" in ran.out and "3.0 MiB at most" in ran.out
    assert "collectives of shards: 80 ms, 75% of it beside computing" in ran.out
    assert (tmp_path / "out" / NAME).read_bytes() == b"trace"
    [listed] = shoal("profiles", job.id, "--json").json()
    assert (listed["number"], listed["state"]) == (1, "done")
    assert "75%" in shoal("profiles", job.id).out
    assert shoal("profiles", job.id, "1", "--json").json() == listed
    missing = shoal("profiles", job.id, "2")
    assert missing.code != 0 and "has no profile 2" in missing.err


def test_a_profile_that_failed_says_why_and_ends_with_an_error(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job()
    service.begin(job)
    assert "shoal profile-job JOB" in shoal("profiles", job.id).out
    supervisor = _answer(service, job, RESULT.model_copy(update={"error": "the worker was lost"}), tmp_path)
    ran = shoal("profile-job", job.id)
    supervisor.join()
    assert ran.code != 0 and "profile 1 failed: the worker was lost" in ran.err
    assert "the worker was lost" in shoal("profiles", job.id).out
