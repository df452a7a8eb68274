"""Projects and priorities around a policy that knows neither, worked out by hand."""

from dataclasses import replace

from kit.market_traces import trace_job
from schedulers import divide_among_projects, max_min, rigid, srtf, with_rules
from shoal_service.core.scheduling.market import Decision, MarketJob, MarketNode, MarketState, Project, Start, Wait
from shoal_service.simulator.traces import WORKER


def _job(name: str, project: str = "default", *, most: int = 8, priority: int = 0) -> MarketJob:
    return MarketJob(
        job_id=name,
        submitted_at=float(ord(name[0])),
        min_workers=1,
        max_workers=most,
        need=WORKER,
        project=project,
        priority=priority,
    )


def _started(workers: int, projects: dict[str, Project], *jobs: MarketJob) -> dict[str, int]:
    state = MarketState(jobs=jobs, nodes=[MarketNode(node_id="n", cpus=float(workers))], projects=projects)
    return {one.job_id: one.workers for one in with_rules(max_min)(state, 0.0) if isinstance(one, Start)}


def test_workers_are_divided_by_weight() -> None:
    projects = {"a": Project(name="a", weight=2), "b": Project(name="b")}
    assert divide_among_projects({"a": [_job("x")], "b": [_job("y")]}, projects, 9) == {"a": 6, "b": 3}


def test_what_one_project_cannot_use_goes_to_the_others() -> None:
    projects = {"a": Project(name="a", weight=2), "b": Project(name="b")}
    assert divide_among_projects({"a": [_job("x", most=2)], "b": [_job("y")]}, projects, 9) == {"a": 2, "b": 7}
    assert divide_among_projects({"b": [_job("y")]}, projects, 9) == {"b": 8}


def test_a_guarantee_comes_first_and_a_limit_is_kept() -> None:
    projects = {"a": Project(name="a", weight=3), "b": Project(name="b", guaranteed=4), "c": Project(name="c", limit=1)}
    jobs = {"a": [_job("x")], "b": [_job("y")], "c": [_job("z")]}
    assert divide_among_projects(jobs, projects, 9) == {"a": 4, "b": 4, "c": 1}
    assert divide_among_projects(jobs, projects, 3) == {"a": 0, "b": 3, "c": 0}


def test_the_policy_decides_within_each_project() -> None:
    projects = {"a": Project(name="a", weight=2), "b": Project(name="b")}
    jobs = [_job("u", "a"), _job("v", "a"), _job("w", "b"), _job("x", "elsewhere")]
    assert _started(8, projects, *jobs) == {"u": 2, "v": 2, "w": 2, "x": 2}


def test_a_higher_priority_chooses_first() -> None:
    assert _started(8, {}, _job("a"), _job("b", most=3, priority=50), _job("c")) == {"b": 3, "a": 3, "c": 2}


def test_with_one_project_and_one_priority_the_policy_decides_alone() -> None:
    jobs = [_job("a"), _job("b"), _job("c", most=1)]
    assert _started(8, {}, *jobs) == {"a": 4, "b": 3, "c": 1}


def test_rigid_jobs_borrow_what_no_project_can_use() -> None:
    """Each project is due 4 of 8 workers, and each job asks for 6: one of them runs, and stays."""
    requests = [trace_job(name, workers=(1, 8), asked=6) for name in ("u", "v")]
    jobs = [_job("u", "a"), _job("v", "b")]
    projects = {"a": Project(name="a"), "b": Project(name="b")}
    nodes = [MarketNode(node_id="n", cpus=8.0)]
    policy = with_rules(rigid(requests, srtf, may_pass=True))
    first = [one for one in policy(MarketState(jobs=jobs, nodes=nodes, projects=projects), 0.0) if not _waits(one)]
    assert [(one.job_id, one.workers) for one in first if isinstance(one, Start)] == [("u", 6)]
    running = [replace(jobs[0], granted=6), jobs[1]]
    later = policy(MarketState(jobs=running, nodes=nodes, projects=projects), 1.0)
    assert all(_waits(one) for one in later)


def _waits(decision: Decision) -> bool:
    return isinstance(decision, Wait)
