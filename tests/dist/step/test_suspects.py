"""What a real group tells of its ranks: who deviates, whose loss is not finite, who is slow and why."""

from __future__ import annotations

import time
from typing import Any

from kit.processes.fleet import PATIENCE_S
from kit.tasks.tiny_tasks import SLOW_S
from shoal_service.core.system_metrics import make_sample
from shoal_workers.contract.messages import StepPart, WorkerUse
from shoal_workers.contract.suspects import Resource
from shoal_workers.contract.worker_reports import StepReport, StepSkipped

SPEC: dict[str, Any] = {
    "task": "tiny_tasks:Faulty",
    "batch": {"global_size": 6, "micro_size": 2},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "health": {"non_finite": "skip"},
}
FAULTY = 1


def job_with(make_job: Any, fault: str) -> tuple[Any, list[Any]]:
    """A job, and its three workers: one of them has the fault in the fourth step."""
    job = make_job(**SPEC, data={"fault": fault})
    workers = job.workers(3)
    workers[FAULTY].strike("forward", 3, "fault")
    workers[FAULTY].strike("forward", 4, "no fault")
    return job, workers


def test_a_rank_that_calls_another_collective_names_itself_and_no_other_does(make_job: Any) -> None:
    job, workers = job_with(make_job, "diverge")
    job.start(workers)
    deadline = time.monotonic() + PATIENCE_S
    while (newest := workers[FAULTY].call("signs")[0]) is None or not newest.deviation:
        assert time.monotonic() < deadline
    exits = job.interrupt(workers)
    assert [one.suspect is not None for one in exits] == [False, True, False]
    suspect = exits[FAULTY].suspect
    assert (suspect.resource, suspect.ranks) == (Resource.PROGRAM, (FAULTY,))
    assert "called a broadcast of 20 bytes" in suspect.evidence[0]


def test_a_loss_that_is_not_finite_on_one_rank_is_that_ranks(make_job: Any) -> None:
    job, workers = job_with(make_job, "nan")
    job.finish(workers)
    assert [(one.step, one.ranks) for one in job.reported(workers, StepSkipped)] == [(4, (FAULTY,))]


def test_each_report_has_the_times_of_all_ranks_and_slow_data_is_seen_on_its_rank_only(make_job: Any) -> None:
    job, workers = job_with(make_job, "slow")
    job.run(workers)
    reports = {one.step: one for one in job.reported(workers, StepReport)}
    slow = reports[4]
    assert slow.data_s[FAULTY] >= SLOW_S and max(slow.data_s[0], slow.data_s[2]) < SLOW_S
    assert slow.compute_s[FAULTY] >= slow.data_s[FAULTY]
    assert len(slow.cpu_wait_s) == len(slow.saving_s) == 3
    assert max(reports[6].data_s) < SLOW_S


def test_the_rank_that_is_slowed_is_the_busiest_and_its_clock_of_phases_says_with_what(make_job: Any) -> None:
    job, workers = job_with(make_job, "slow")
    job.run(workers)
    spent = [worker.call("part_seconds") for worker in workers]
    uses = {rank: [WorkerUse(at=1.0, phases=_shares(seconds))] for rank, seconds in enumerate(spent)}
    sample = make_sample(uses, num_ranks=3, generation=1, at=1.0)
    busy = [value or 0.0 for value in sample.values["busy"]]
    assert busy.index(max(busy)) == FAULTY and busy[FAULTY] > max(busy[0], busy[2]) + 0.1
    assert spent[FAULTY][StepPart.DATA] >= SLOW_S > max(spent[0][StepPart.DATA], spent[2][StepPart.DATA])
    assert min(spent[0][StepPart.COMMUNICATION], spent[2][StepPart.COMMUNICATION]) >= SLOW_S / 2
    parts = (StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)
    assert all(seconds[part] > 0 for seconds in spent for part in parts), spent


def _shares(seconds: dict[StepPart, float]) -> dict[StepPart, float]:
    """Shares without what is not part of a step: forming the group takes all ranks equally long."""
    steps = {part: amount for part, amount in seconds.items() if part is not StepPart.OTHER}
    return {part: amount / sum(steps.values()) for part, amount in steps.items()}
