"""What the pages show, on both databases: roll-ups against a scan, samples, labels, search, order and pages."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from kit.views import series_point, worker_view
from shoal_service.core.downsampling import SeriesPoint, bucket_steps, downsample
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.where.language import LabelSelector
from shoal_service.store import Store, curves, histories, job_lists
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_workers.contract.job import JobState


def point(step: int, loss: float, generation: int = 1) -> SeriesPoint:
    return series_point(step, at=10.0 + step, loss=loss, tokens_per_s=float(step), step_s=0.1, generation=generation)


def report_steps(attempt: Any, losses: dict[int, float], *, at_once: int, generation: int = 1) -> None:
    steps = sorted(losses)
    for begin in range(0, len(steps), at_once):
        attempt.report(series=tuple(point(step, losses[step], generation) for step in steps[begin : begin + at_once]))


@pytest.mark.parametrize(("num_steps", "at_once"), [(200, 1), (600, 7), (4_700, 500)])
def test_a_long_series_is_read_from_roll_ups_as_if_every_step_were_read(
    store: Store, begin: Callable[..., Any], num_steps: int, at_once: int, job_id: str
) -> None:
    draw = random.Random(at_once)
    losses = {step: draw.random() for step in range(1, num_steps + 1)}
    report_steps(begin(job_id), losses, at_once=at_once)
    every = store.reading(histories.read_series)(job_id)
    expected = downsample(every, first_step=1, width=bucket_steps(1, num_steps, 50))
    curve = store.reading(curves.read_curve)(job_id, after_step=-1, max_points=50)
    assert len(curve) == len(expected) <= 50
    assert curve[-1].step == num_steps
    assert sum(point.loss for point in curve) / len(curve) == pytest.approx(
        sum(point.loss for point in expected) / len(expected), rel=0.02
    )
    assert all(point.at == 10.0 + point.step for point in curve), "step and time are those of the last step of a bucket"


def test_steps_that_are_computed_again_change_the_roll_ups(store: Store, job_id: str, attempt: Any) -> None:
    report_steps(attempt, dict.fromkeys(range(1, 4801), 1.0), at_once=400)
    report_steps(attempt, dict.fromkeys(range(4001, 4801), 3.0), at_once=90, generation=2)
    curve = store.reading(curves.read_curve)(job_id, after_step=-1, max_points=6)
    assert {point.loss for point in curve if point.step <= 4000} == {1.0}
    assert curve[-1].loss == pytest.approx(3.0, rel=1e-9)
    assert curve[-1].generation == 2


def test_metrics_of_a_task_are_kept_in_the_series_in_roll_ups_and_in_columns(
    store: Store, begin: Callable[..., Any], job_id: str
) -> None:
    own = {step: {"acc": step / 5000, **({"rare": 4.0} if step == 9 else {})} for step in range(1, 4801)}
    points = tuple(
        point(step, 1.0).model_copy(
            update={"metrics": own[step], "val_metrics": {"acc": 0.5} if step % 1000 == 0 else {}}
        )
        for step in own
    )
    begin(job_id).report(series=points)
    assert [(point.metrics, point.val_metrics) for point in store.reading(histories.read_series)(job_id)] == [
        (point.metrics, point.val_metrics) for point in points
    ]
    curve = store.reading(curves.read_curve)(job_id, after_step=-1, max_points=6)  # of roll-ups
    assert [point.metrics["acc"] for point in curve] == pytest.approx(
        [(point.step - 399.5) / 5000 for point in curve], rel=0.01
    )
    assert curve[0].metrics["rare"] == 4.0 and "rare" not in curve[1].metrics
    assert [point.val_metrics for point in curve] == [{}, *[{"acc": 0.5}] * 4, {}]

    columns = store.reading(histories.read_overview)(job_id).series
    assert columns == store.reading(histories.read_series_columns)(job_id)
    assert list(columns.metrics) == ["acc", "rare"] and list(columns.val_metrics) == ["acc"]
    assert all(len(values) == len(columns.step) for values in columns.metrics.values())
    assert [value for value in columns.metrics["rare"] if value is not None] == [4.0]
    assert [value for value in columns.val_metrics["acc"] if value is not None] == [0.5] * 4


def test_a_job_without_metrics_has_none(store: Store, begin: Callable[..., Any], job_id: str) -> None:
    report_steps(begin(job_id), dict.fromkeys(range(1, 20), 1.0), at_once=19)
    assert store.reading(histories.read_series_columns)(job_id).metrics == {}
    assert {point.val_metrics == point.metrics == {} for point in store.reading(histories.read_series)(job_id)} == {
        True
    }


def test_a_range_of_steps_is_read_finer(store: Store, begin: Callable[..., Any], job_id: str) -> None:
    report_steps(begin(job_id), {step: float(step) for step in range(1, 301)}, at_once=300)
    curve = store.reading(curves.read_curve)(job_id, after_step=99, until_step=120, max_points=100)
    assert [point.step for point in curve] == list(range(100, 121))


def test_losses_that_are_not_finite_stay_visible(store: Store, begin: Callable[..., Any], job_id: str) -> None:
    losses = {step: math.nan if step == 5 else 1.0 for step in range(1, 5001)}
    report_steps(begin(job_id), losses, at_once=1000)
    columns = store.reading(histories.read_series_columns)(job_id, max_points=100)
    assert columns.loss[0] is None and set(columns.loss[1:]) == {1.0}


def goodput(productive: float, total: float) -> Goodput:
    seconds = {Category.PRODUCTIVE: productive, Category.QUEUED: total - productive}
    return Goodput(at=1.0, seconds=seconds, total=total, ratio=productive / total)


def test_the_accounts_are_sampled_at_changes_and_now_and_then(
    store: Store, submit: Callable[..., str], begin: Callable[..., Any]
) -> None:
    job_id = submit(elasticity={"min_workers": 1, "max_workers": 3})
    attempt = begin(job_id, workers=2)
    for second in range(60):
        workers = 2 if second < 30 else 1
        attempt.report(now=10.0 + second, status_workers=workers, status_goodput=goodput(1.0 + second, 5.0 + second))
    samples = store.reading(curves.read_samples)(job_id)
    assert list(samples.at) == sorted(samples.at)
    assert samples.workers[-1] == 1 and samples.at[samples.workers.index(1)] == 40.0, "a change is sampled at once"
    assert set(samples.wanted) == {3} and samples.granted[-1] == 2
    assert 8 < len(samples.at) < 25
    assert samples.seconds[Category.PRODUCTIVE][-1] == pytest.approx(1.0 + samples.at[-1] - 10.0)
    *_, bins, accounts = store.reading(job_lists.fleet_accounts)()
    assert sum(goodput.total for goodput in bins) == pytest.approx(5.0 + samples.at[-1] - 10.0)
    assert accounts is not None and accounts.total == 64.0
    assert store.reading(curves.read_samples)(job_id, after=samples.at[-2]).at == samples.at[-1:]


def test_jobs_are_searched_filtered_ordered_and_paged(
    store: Store, submit: Callable[..., str], begin: Callable[..., Any]
) -> None:
    ids = [submit(name=f"run-{n}", labels={"sweep": "lr", "lr": f"{n}e-3"}, priority=n % 2) for n in range(5)]
    other = submit(name="cod", project="sea")
    begin(ids[3]).report(status_loss=0.5)
    begin(ids[1]).report(status_loss=0.25, series=(point(1, 1.0), point(2, 0.5)))

    def find_ids(**query: Any) -> list[str]:
        return [job.id for job in store.reading(job_lists.fleet)(FleetQuery(**query))[0]]

    assert find_ids() == [other, *reversed(ids)]
    assert (
        find_ids(search="RUN-2") == [ids[2]] and find_ids(search="4e-3") == [ids[4]] and find_ids(search="100%") == []
    )
    assert find_ids(search="run lr=3e") == [ids[3]] and find_ids(search="run 3e-3 cod") == [], (
        "every word must be found"
    )
    assert find_ids(project="sea") == [other]
    assert find_ids(labels=(LabelSelector("sweep"),), descending=False) == ids
    assert find_ids(labels=(LabelSelector("sweep", "lr"), LabelSelector("lr", "2e-3"))) == [ids[2]]
    assert find_ids(order=JobOrder.LOSS, descending=False)[:2] == [ids[1], ids[3]], "jobs without a loss come last"
    assert find_ids(order=JobOrder.LOSS)[:2] == [ids[3], ids[1]]
    assert find_ids(states=frozenset({JobState.QUEUED}), order=JobOrder.PRIORITY, limit=1) == [other]
    page, total = store.reading(job_lists.fleet)(FleetQuery(offset=2, limit=2))
    assert [job.id for job in page] == [ids[3], ids[2]] and total == 6
    [job] = store.reading(job_lists.fleet)(FleetQuery(ids=frozenset({ids[1]})))[0]
    assert (job.losses, job.world_sizes, job.labels["lr"]) == ((1.0, 0.5), (2, 2), "1e-3")
    for order in JobOrder:
        assert len(find_ids(order=order)) == 6


def test_what_runs_on_each_node_is_known(store: Store, begin: Callable[..., Any], job_id: str) -> None:
    workers = tuple(worker_view(rank, worker_id=f"w{rank}", node_ip="") for rank in (1, 0, None))
    begin(job_id).report(workers=workers)
    [on_node] = store.reading(job_lists.jobs_by_node)()["n1"]
    assert (on_node.job_id, on_node.ranks, on_node.num_workers) == (job_id, (0, 1), 3)
