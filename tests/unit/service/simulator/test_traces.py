"""Files of a simulation: jobs, nodes over time and projects, and what is wrong with them."""

from pathlib import Path

import pytest

from shoal_service.core.scheduling.market import ClusterState, Project
from shoal_service.simulator.traces import (
    AWAY,
    Capacity,
    TraceError,
    parse_capacity,
    parse_curves,
    parse_projects,
    parse_trace,
    read_trace,
)

OWN = """# made by hand
submit_s,work_samples,min_workers,max_workers,curve,priority,project
20,300,1,4,1:10 2:18 4:30,50,vision
10,100,2,2,2:7,,
"""
PUBLISHED = """job,submit_s,application,batch,min_workers,max_workers,asked_workers,work_samples,restart_s
bert-0,5,bert,64,1,4,3,1000,120
"""
CURVES = '{"bert/64": {"1": 10, "2": 20, "3": 15, "4": 30}}'


def test_a_self_contained_trace_is_read_in_the_order_of_submission() -> None:
    first, second = parse_trace(OWN, "own.csv").jobs
    assert (first.job_id, first.submit_s, first.work, first.project, first.priority) == ("job-2", 10, 100, "default", 0)
    assert (first.min_workers, first.max_workers, first.asked_workers, first.restart_s) == (2, 2, 2, None)
    assert (second.job_id, second.project, second.priority) == ("job-1", "vision", 50)
    assert [second.curve.rate(workers) for workers in (1, 2, 3, 4)] == [10, 18, 24, 30]


def test_a_published_trace_takes_its_curves_from_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(PUBLISHED)
    (tmp_path / "t.curves.json").write_text(CURVES)
    (job,) = read_trace(tmp_path / "t.csv").jobs
    assert (job.job_id, job.asked_workers, job.restart_s) == ("bert-0", 3, 120)


def test_a_job_may_name_its_cluster_and_how_long_it_waits_for_it() -> None:
    text = "submit_s,work_samples,min_workers,max_workers,curve,cluster,wait_s\n0,1,1,1,1:1,west,60\n1,1,1,1,1:1,any,\n"
    tied, free = parse_trace(text, "t.csv").jobs
    assert (tied.cluster, tied.wait_s, free.cluster, free.wait_s) == ("west", 60.0, "", 1800.0)


def test_a_job_is_never_slower_with_more_workers() -> None:
    """It may leave one of them idle."""
    (job,) = parse_trace(PUBLISHED, "t.csv", parse_curves(CURVES, "t.curves.json")).jobs
    assert [job.curve.rate(workers) for workers in (1, 2, 3, 4)] == [10, 20, 20, 30]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("20,300", "20,", "own.csv, line 3, column work_samples: '' is not a number"),
        ("20,300", "soon,300", "own.csv, line 3, column submit_s: 'soon' is not a number"),
        ("10,100", "-1,100", "own.csv, line 4, column submit_s: -1 must be 0 or more"),
        ("20,300", "20,0", "own.csv, line 3, column work_samples: 0 must be more than 0"),
        ("300,1,4", "300,1.5,4", "own.csv, line 3, column min_workers: 1.5 is not a whole number"),
        ("300,1,4", "300,5,4", "own.csv, line 3, column max_workers: 4 must be 5 or more"),
        ("1:10 2:18", "1:10 2=18", "own.csv, line 3, column curve: '2=18' is not WORKERS:SAMPLES_PER_SECOND"),
        ("1:10 2:18", "0:10 2:18", "own.csv, line 3, column curve: .* needs world sizes of 1 or more"),
        (",,", ",,,", "own.csv, line 4, column project: there are more fields than the 7 columns"),
        ("work_samples", "work", "own.csv has no column work_samples"),
        ("curve,", "speed,", "own.csv has no column curve"),
        ("priority", "urgency", "own.csv has the unknown column urgency"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_column(old: str, new: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_trace(OWN.replace(old, new, 1), "own.csv")


def test_an_empty_trace_a_second_job_of_a_name_and_a_missing_curve_are_refused() -> None:
    with pytest.raises(TraceError, match="has no jobs"):
        parse_trace(PUBLISHED.splitlines()[0], "t.csv")
    with pytest.raises(TraceError, match="line 3, column job: 'bert-0' is the name of an earlier job, too"):
        parse_trace(PUBLISHED + PUBLISHED.splitlines()[1], "t.csv", parse_curves(CURVES, "c"))
    with pytest.raises(TraceError, match="line 2, column application: there is no curve 'bert/64'"):
        parse_trace(PUBLISHED, "t.csv", {})
    with pytest.raises(TraceError, match="line 2, column asked_workers: 5 is more than max_workers, 4"):
        parse_trace(PUBLISHED.replace(",4,3,", ",4,5,"), "t.csv", parse_curves(CURVES, "c"))


@pytest.mark.parametrize("text", ["[]", "{", '{"a/1": {"one": 1}}', '{"a/1": {}}', '{"a/1": {"1": -3}}'])
def test_a_file_of_curves_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=r"must be JSON like|needs world sizes"):
        parse_curves(text, "x.curves.json")


def test_hours_with_a_comment_as_header_and_two_lines_for_a_step() -> None:
    text = "# at_h,nodes  (nodes alive from this hour on)\n0.000,0\n0.5,0\n0.5,9\n1,9\n1,2\n2,2\n"
    assert parse_capacity(text, "spot.csv", 4) == Capacity(4, ((0.0, 0), (1800.0, 9), (3600.0, 2)))


def test_seconds_that_start_later_begin_without_nodes() -> None:
    assert parse_capacity("at_s,nodes\n10,3\n", "c.csv", 1) == Capacity(1, ((0.0, 0), (10.0, 3)))
    assert parse_capacity("at_s,nodes\n0,3\n", "c.csv", 1) == Capacity.constant(3, 1)


def test_lines_of_several_clusters_one_of_which_is_lost_for_a_while() -> None:
    text = "at_s,cluster,nodes\n0,west,2\n0,east,3\n10,west,away\n20,west,2\n20,east,3\n"
    capacity = parse_capacity(text, "c.csv", 4)
    west = ((0.0, 2), (10.0, AWAY), (20.0, 2))
    assert capacity == Capacity.of_clusters({"east": [(0.0, 3)], "west": west}, 4)
    assert capacity.steps == ((0.0, 5), (10.0, 3), (20.0, 5))
    assert capacity.workers_by_cluster(1) == {"east": 12, "west": 0}
    assert [node.cluster for node in capacity.nodes(0)] == ["east"] * 3 + ["west"] * 2
    assert capacity.states(1) == {"east": ClusterState.OPEN, "west": ClusterState.AWAY}
    assert capacity.worker_seconds(0, 30) == 4 * (3 * 30 + 2 * 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s,cluster,nodes\n0,3\n", "line 2: '0,3' is not a time, the name of a cluster"),
        ("at_s,cluster,nodes\n0,West,3\n", "line 2: '0,West,3' is not a time, the name of a cluster"),
        ("at_s,nodes\n0,away\n", "line 2: '0,away' is not a time and a number of nodes"),
        ("0,1\n", "line 1: a line before this one must name the columns"),
        ("at_h,nodes\n0,1\nx,2\n", "line 3: 'x,2' is not a time and a number of nodes"),
        ("at_h,nodes\n0,1,2\n", "line 2: there are 3 columns in place of 2"),
        ("at_h,nodes\n0,1.5\n", "line 2: '0,1.5' needs a time and a whole number of nodes"),
        ("at_h,nodes\n-1,2\n", "line 2: '-1,2' needs a time"),
        ("at_h,nodes\n2,1\n1,2\n", "line 3: the time 1 is before that of the line above"),
        ("at_h,nodes\n", "has no lines"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_capacity(text, "c.csv", 1)


def test_projects_by_name_with_defaults() -> None:
    document = {"research": None, "vision": {"weight": 2, "guaranteed": 8, "parent": "research"}}
    assert parse_projects(document, "p.yaml") == {
        "research": Project(name="research"),
        "vision": Project(name="vision", weight=2, guaranteed=8, parent="research"),
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], "p.yaml must have one key for each project"),
        ({"a": 3}, "project a: 3 is not a mapping"),
        ({"a": {"wait": 1}}, "project a: the setting 'wait' is unknown. Known are parent, weight, guaranteed"),
        ({"a": {"limit": -1}}, "project a: limit is -1 and must be a whole number"),
        ({"a": {"guaranteed": "8"}}, "project a: guaranteed is '8' and must be a whole number"),
        ({"a": {"weight": 0}}, "project a: weight is 0 and must be a number above 0"),
        ({"a": {"parent": "b"}}, "project a: its parent 'b' is not in the file"),
    ],
)
def test_what_is_wrong_is_said_with_the_project(document: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_projects(document, "p.yaml")
