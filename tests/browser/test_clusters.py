"""Several clusters on the pages, and one that nothing is said about."""

from __future__ import annotations

import time

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import RUNNING, Service
from shoal_service.access_views import ClusterTokenRequest
from shoal_service.fleet_views import ClusterSummary, NodeView
from shoal_service.store import cluster_links, driving
from shoal_service.views import JobView

ACTIONS = "[...document.querySelectorAll('#actions button')].map((one) => one.dataset.action)"
JOBS = "[...document.querySelectorAll('#jobs tr')].map((one) => one.dataset.id)"


@pytest.fixture
def two(written: Service) -> Service:
    """A cluster that answers, and one that is away."""
    for name in ("default", "west"):
        written.store.writing(cluster_links.create_token)(name, ClusterTokenRequest(), by="test", now=time.time())
    summaries = (
        ClusterSummary(name="default", connected=True, silent_s=0.2, num_nodes=1, cpus_total=16, cpus_free=4),
        ClusterSummary(name="west", why_away="its gateway does not report", silent_s=95.0),
    )
    nodes = tuple(
        NodeView(node_id=letter * 56, ip=ip, cluster=name, alive=True, cpus=16, gpus=0, memory_gib=8)
        for letter, ip, name in (("a", "10.0.0.1", "default"), ("b", "10.1.0.1", "west"))
    )
    written.cluster.view = written.cluster.view.model_copy(update={"clusters": summaries, "nodes": nodes})
    return written


def run_in(service: Service, cluster: str, name: str) -> JobView:
    job = service.add_job(name=name)
    service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=4, cluster=cluster, now=time.time())
    service._seq[job.id] = 0
    service.report(job, RUNNING.model_copy(update={"workers": 4}))
    return job


def test_nodes_are_grouped_and_jobs_found_by_cluster(reader: Browser, two: Service) -> None:
    here, there = run_in(two, "default", "here"), run_in(two, "west", "there")
    two.store.writing(cluster_links.label)("default", {"region": "eu"})
    two.store.writing(cluster_links.cordon)("default", reason="new <i>switches</i>", now=time.time())
    reader.open(f"{two.url}/")
    reader.sees("#nodes", "away: its gateway does not report, silent for 1.58 min")
    shown = reader.run(
        "[...document.querySelector('#nodes').children].map((one) => one.dataset.cluster ?? one.title[0])"
    )
    assert shown == ["default", "a", "west", "b"]
    text = reader.text("#nodes")
    assert "4 of 16 CPUs free, 1 job" in text and "region=eu" in text
    assert "cordoned: new <i>switches</i>" in text, "text, never markup"
    reader.sees("#cluster", "2 clusters (west away)")
    assert "in west" in reader.text("#jobs") and "in default" in reader.text("#jobs")

    reader.click("#more summary")
    _choose(reader, "#cluster-filter", "west", "change")
    reader.until(lambda: reader.run(JOBS) == [there.id], "only the jobs of west")
    assert reader.run("location.search").count("cluster=west") == 1, "the view can be shared"
    reader.open(f"{two.url}/?cluster=default")
    reader.until(lambda: reader.run(JOBS) == [here.id], "only the jobs of default")
    assert reader.complaints() == []


def test_a_job_says_where_it_runs_and_is_moved(reader: Browser, two: Service) -> None:
    job = run_in(two, "default", "moved")
    reader.open(f"{two.url}/jobs/{job.id}")
    reader.sees("#facts", "Cluster")
    reader.until(lambda: "move" in reader.run(ACTIONS), "the button")
    reader.click('[data-action="move"]')
    reader.sees("#dialog-words", "That is what the spec says now.")
    _choose(reader, "#dialog-value", "west", "input")
    reader.sees("#dialog-words", "ends its 4 workers in default")
    reader.sees("#dialog-words", "west: away: its gateway does not report")
    two.cluster.why_not["west"] = "the cluster is away"
    reader.click("#confirm")
    reader.sees("#dialog-error", "cannot be moved to cluster west: the cluster is away")
    two.cluster.why_not.clear()
    reader.click("#confirm")
    reader.until(lambda: two.store.get_job(job.id).spec.worker.cluster == "west", "the move")
    reader.sees("#facts", "default, to west")
    reader.click("#tab-events")
    reader.sees("#events", "moves the job to cluster west from default")


def test_with_one_cluster_nothing_is_said_about_clusters(reader: Browser, written: Service) -> None:
    job = run_in(written, "default", "alone")
    written.store.writing(cluster_links.create_token)("default", ClusterTokenRequest(), by="test", now=time.time())
    reader.open(f"{written.url}/")
    reader.until(lambda: reader.run(JOBS) == [job.id], "the job")
    reader.click("#more summary")
    assert not reader.run("document.querySelector('#of-cluster').checkVisibility()")
    assert "default" not in reader.text("#nodes") + reader.text("#cluster")
    assert "in default" not in reader.text("#jobs")
    reader.open(f"{written.url}/jobs/{job.id}")
    reader.sees("#title", "RUNNING")
    assert "move" not in reader.run(ACTIONS) and "Cluster" not in reader.text("#facts")
    assert reader.complaints() == []


def _choose(browser: Browser, selector: str, value: str, event: str) -> None:
    found = f"document.querySelector('{selector}')"
    browser.run(f"(() => {{ {found}.value = '{value}'; {found}.dispatchEvent(new Event('{event}')); }})()")
