"""The pages for operators: `shoal top`, clusters, nodes, webhooks."""

import io
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shoal_api.cli.render.fleet import fleet_goodput, render_clusters, render_nodes, render_top, render_webhooks
from shoal_service.core.nodes import Cordon
from shoal_service.fleet_views import ClusterSummary, ClusterView, DrainView, NodeView
from shoal_service.views import JobSummary, WebhookView
from shoal_workers.contract.job import JobState

NODE = NodeView(node_id="n", ip="127.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=1)
CLUSTER = ClusterView(
    connected=True,
    address="a",
    nodes=(NODE, NODE.model_copy(update={"alive": False})),
    cpus_total=4,
    cpus_free=1,
    gpus_total=0,
    gpus_free=0,
    owner="o",
    epoch=1,
)


def job(job_id: str, state: JobState = JobState.RUNNING, **fields: Any) -> JobSummary:
    return JobSummary(id=job_id, name=f"name-{job_id}", state=state, created_at=0, updated_at=0, **fields)


def text_of(*arguments: Any, **options: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_top(*arguments, **options))
    return console.export_text()


def test_the_head_sums_the_fleet_and_jobs_in_trouble_come_first() -> None:
    jobs = [
        job("a", workers=3, desired_workers=4, goodput=0.9, incidents=2, tokens_per_s=1234.0),
        job("b", JobState.QUEUED, queue_position=1),
        job("c", JobState.RECOVERING, workers=1, desired_workers=1, goodput=0.5, note="waits for workers"),
    ]
    lines = text_of(jobs, CLUSTER, 0.0).splitlines()
    assert "1 RECOVERING, 1 RUNNING, 1 QUEUED" in lines[0]
    for part in ("workers 4/5", "goodput 82.0%", "2 incidents", "1 node, 1 of 4 CPUs free", "1 node dead"):
        assert part in lines[1]
    assert [line.split()[0] for line in lines[4:]] == ["c", "a", "b"]
    assert "waits for workers" in lines[4] and "1,234" in lines[5] and "#1" in lines[6]


def test_more_jobs_than_rows_are_counted() -> None:
    assert "and 3 more jobs" in text_of([job(str(number)) for number in range(5)], CLUSTER, 0.0, max_rows=2)


def test_goodput_is_weighted_with_the_workers() -> None:
    assert fleet_goodput([]) is None
    assert fleet_goodput([job("a", goodput=1.0, desired_workers=3), job("b", goodput=0.0, desired_workers=1)]) == 0.75


def clusters_shown(*clusters: ClusterSummary) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render_clusters(clusters))
    return capture.get()


def test_every_cluster_is_readable_at_80_columns() -> None:
    default = ClusterSummary(name="default", connected=True, num_nodes=3, cpus_total=48, cpus_free=7.5, num_jobs=4)
    west = ClusterSummary(
        name="west-of-the-river-1",
        why_away="its gateway has not reported for 95 s",
        silent_s=95.0,
        gpus_total=64,
        gpus_free=8,
        labels={"region": "eu", "tier": "spot"},
        cordon=Cordon(reason="new switches", requested_at=1.0),
    )
    text = clusters_shown(default, west)
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("7.5/48", "8/64", "region=eu, tier=spot", "cordoned: new switches", "has not reported for 95 s"):
        assert words in text, words


def test_a_cluster_without_gpus_has_no_column_for_them_and_one_that_never_came_is_not_away() -> None:
    text = clusters_shown(ClusterSummary(name="new", why_away="its gateway has not reported yet"))
    assert "GPUs" not in text and "not joined" in text


def test_without_a_cluster_the_way_to_one_is_shown() -> None:
    assert "shoal token create" in clusters_shown()


@pytest.mark.parametrize(("num_workers", "words"), [(0, "drained"), (2, "draining")])
def test_a_node_is_drained_once_no_worker_is_left_on_it(num_workers: int, words: str) -> None:
    """It was "drained" at once, while a job trained there."""
    drain = DrainView(reason="new disks", requested_at=1.0, source="api")
    node = NodeView(
        node_id="a" * 56, ip="10.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=8, drain=drain, num_workers=num_workers
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_nodes([node]))
    shown = capture.get()
    assert f" {words} " in shown and "new disks" in shown
    assert ("2 workers left" in shown) == bool(num_workers)


def test_what_others_have_reserved_on_a_node_is_said() -> None:
    node = NodeView(node_id="a" * 56, ip="10.0.0.1", alive=True, cpus=8, gpus=1, memory_gib=8, cpus_of_others=6)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_nodes([node]))
    assert "6 CPUs reserved by others" in capture.get()


def hooks_shown(*hooks: WebhookView) -> list[str]:
    console = Console(file=StringIO(), width=200)
    console.print(render_webhooks(hooks, 100.0))
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_each_hook_has_a_line_with_what_it_waits_for() -> None:
    quiet = WebhookView(hook="service/ops", job_id=None, receiver="https://a", events=("job.*",))
    good = quiet.model_copy(update={"delivered": 7, "delivered_at": 88.0})
    bad = WebhookView(
        hook="job/0",
        job_id="job-1",
        receiver="https://b",
        events=("job.state", "incident.*"),
        gave_up=2,
        failing=1,
        waiting_since=40.0,
        next_at=110.0,
        error="has answered 500",
    )
    assert hooks_shown(quiet, good, bad)[1:] == [
        "service/ops all https://a job.* 0 0 nothing sent yet",
        "service/ops all https://a job.* 7 0 last 12 s ago",
        "job/0 job-1 https://b job.state, incident.* 0 2 waits for 60 s: has answered 500, next attempt in 10 s",
    ]


def test_without_hooks_the_way_to_set_one_is_named() -> None:
    assert hooks_shown() == ["no webhook; docs/webhooks.md says how to set one"]
