from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from shoal_api.cli.render.live.top_page import fleet_goodput, top_page
from shoal_service.fleet_views import ClusterView, NodeView
from shoal_service.views import JobSummary
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
    console.print(top_page(*arguments, **options))
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
