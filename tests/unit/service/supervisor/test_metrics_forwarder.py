"""The points of a job reach its metrics hook beside one worker, also over deaths; a hook that fails costs one event."""

import pytest

from doubles.event_loop import until
from doubles.fake_workers import FakeWorker
from doubles.supervisor_bench import SPEC, SupervisorBench
from kit.views import series_point
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.catalogue import describe
from shoal_service.supervisor.inspection import describe_end
from shoal_service.supervisor.reporting.reporter import MetricBacklog
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.spec import MetricsSpec

WITH_HOOK = SPEC.model_copy(update={"metrics": MetricsSpec(hook="m:hook")})


def steps(worker: FakeWorker) -> list[int]:
    """That were sent to the hook beside it, each once."""
    return list({point.seq: point.step for batch in worker.batches for point in batch.points}.values())


async def test_points_go_to_the_hook_of_rank_0_and_the_end_before_the_workers_are_released() -> None:
    bench = SupervisorBench(spec=WITH_HOOK)
    await bench.start_and_train()
    host, other = bench.workers.group
    await bench.advance_until(lambda: steps(host) == [1])
    assert host.batches[0].points[0].values["loss"] == bench.status.loss and host.batches[0].end == ""
    bench.workers.train()
    await bench.advance_until(lambda: steps(host) == [1, 2])
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    assert host.batches[-1].end == "cancelled" and other.batches == []
    assert "metrics.hook_failed" not in bench.events()


async def test_without_a_hook_no_worker_gets_points(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    await bench.clock.advance(5.0)
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    assert all(worker.batches == [] for worker in bench.workers.created)


async def test_after_the_death_of_its_worker_another_gets_what_was_not_logged() -> None:
    bench = SupervisorBench(spec=WITH_HOOK)
    await bench.start_and_train()
    host, survivor = bench.workers.group
    host.hook_error = "ConnectionError: refused"
    await bench.advance_until(lambda: steps(host) == [1])
    host.die()
    await bench.advance_until(lambda: bench.workers.group and bench.workers.group[0].assignment.generation == 2)
    bench.workers.form(1)
    bench.workers.train()
    await bench.advance_until(lambda: steps(survivor) == [1, 2])


async def test_a_hook_that_fails_is_one_event_with_the_way_out_and_the_job_trains_on() -> None:
    bench = SupervisorBench(spec=WITH_HOOK)
    await bench.start_and_train()
    host = bench.workers.group[0]
    host.hook_error = "ModuleNotFoundError: No module named 'mlflow'"
    await bench.advance_until(lambda: len(host.batches) > 4)
    bench.workers.train()
    await until(lambda: bench.status.step == 2, "training goes on")
    [event] = [event for event in bench.reports.events if event.type == "metrics.hook_failed"]
    assert "hook m:hook logs nothing, 1 point waiting: ModuleNotFoundError" in describe(event.type, event.data).message
    host.hook_error = ""
    await bench.advance_until(lambda: host.hook_logged == 2)
    assert bench.events().count("metrics.hook_failed") == 1


async def test_a_worker_keeps_a_report_until_its_point_is_logged_so_a_restarted_supervisor_gets_it_again() -> None:
    bench = SupervisorBench(spec=WITH_HOOK)
    await bench.start_and_train()
    host = bench.workers.group[0]
    host.hook_error = "ConnectionError: refused"
    bench.outbox.pull(bench.outbox.seq, 0.0)  # the control plane has stored all
    await bench.advance_until(lambda: len(host.batches) > 4)
    assert host.acknowledged == 0
    num_batches = len(host.batches)
    host.hook_error = ""
    await bench.restart()
    await bench.advance_until(lambda: host.hook_logged > 0)
    assert [point.step for batch in host.batches[num_batches:] for point in batch.points][:1] == [1]
    bench.outbox.pull(bench.outbox.seq, 0.0)
    bench.workers.train()
    await bench.advance_until(lambda: host.acknowledged > 0)


def test_the_backlog_is_bounded_and_counts_what_it_drops() -> None:
    backlog = MetricBacklog(has_hook=True, max_points=3)
    for step in range(1, 6):
        backlog.add(point(step))
    assert [point.seq for point in backlog.read_oldest(10)] == [3, 4, 5] and backlog.num_dropped == 2
    assert (backlog.added, backlog.settled) == (5, 2)
    backlog.drop_logged(4)
    assert (backlog.num_waiting, backlog.settled) == (1, 4)
    backlog.drop_logged(5)
    assert backlog.settled == 5
    unused = MetricBacklog(has_hook=False)
    unused.add(point(1))
    assert (unused.added, unused.settled, unused.num_waiting) == (0, 0, 0)


def test_a_value_that_is_not_finite_is_left_out() -> None:
    backlog = MetricBacklog(has_hook=True)
    backlog.add(point(1).model_copy(update={"loss": float("nan"), "metrics": {"accuracy": 0.5}}))
    [only] = backlog.read_oldest(1)
    assert "loss" not in only.values and only.values["metrics/accuracy"] == 0.5 and only.values["lr"] == 0.1


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (EndReason.FINISHED, "succeeded"),
        (EndReason.CANCELLED, "cancelled"),
        (EndReason.PAUSED, "paused"),
        (EndReason.PREEMPTED, "queued"),
        (EndReason.USER_ERROR, "failed"),
    ],
)
def test_the_end_has_the_words_of_the_job(reason: EndReason, words: str) -> None:
    assert describe_end(reason) == words


def point(step: int) -> SeriesPoint:
    return series_point(step, at=1.0, loss=0.5)
