"""Goodput, incidents and parity as the command line shows them, against a real server."""

from typing import Any

import pytest

from kit.views import incident_view, series_point
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.goodput import Goodput
from shoal_service.core.node_loss import NodeLossBound, Protection, WorkerLossBound
from shoal_service.views import IncidentView, JobStatus
from shoal_workers.contract.job import JobState

AT = 1_700_000_000.0
GOODPUT = Goodput(
    at=AT + 100,
    seconds={"productive": 300.0, "recovering": 60.0, "degraded": 40.0},
    recovering={"worker_died": 50.0, "hung": 10.0},
    total=400.0,
    ratio=0.75,
)


def status(**fields: Any) -> JobStatus:
    return JobStatus(state=JobState.RUNNING, attempt=1, workers=4, desired_workers=4, step=3, **fields)


def incident(number: int, **fields: Any) -> IncidentView:
    return incident_view(number, witness="run call", ranks=(2,), worker_ids=("s2",), at=AT, **fields)


WORKER_BOUND = WorkerLossBound(at_most=3, reason="torch.optim.Muon is not elementwise")
BOUND = NodeLossBound(
    protection=Protection.COPIES, at_most=24, now=7, every_steps=20, reason="the optimizer is not the built-in AdamW"
)
CLOSED = incident(
    1,
    to_workers=3,
    detect_s=0.05,
    quiesce_s=0.03,
    plan_s=0.01,
    form_s=0.1,
    restore_s=0.04,
    first_step_s=0.2,
    recovery_s=0.4,
    state_source="memory",
    bytes_moved=3 * 2**20,
    steps_lost=1,
    from_layout="fsdp4",
    to_layout="fsdp3",
    action="restart process, shrink",
    closed=True,
    message="killed by signal 9",
    node_loss=BOUND,
)


def losses(*values: float) -> tuple[SeriesPoint, ...]:
    return tuple(series_point(i + 1, at=AT, loss=value, lr=1, world_size=4) for i, value in enumerate(values))


@pytest.fixture
def trained(service: Any) -> Any:
    def train(*values: float, **changes: Any) -> str:
        job = service.add_job(**changes)
        service.begin(job)
        shown = status(
            goodput=GOODPUT,
            node_loss=BOUND,
            worker_loss=WORKER_BOUND,
            snapshot_every_steps=1,
            snapshot_share=0.004,
        )
        service.report(job, shown, incidents=(CLOSED, incident(2)), series=losses(*values))
        return str(job.id)

    return train


def test_goodput_is_shown_with_its_share_by_category_and_cause(shoal: Any, trained: Any) -> None:
    job_id = trained()
    text = shoal("goodput", job_id).out
    assert "goodput 75.0 %" in text and "83.3 % of the worker time that it had" in text
    assert "productive" in text and "worker_died" in text and "12.5 %" in text
    assert "█" * 60 in text
    assert "queued" not in text
    assert shoal("goodput", job_id, "--json").json()["ratio"] == 0.75


def test_the_time_in_the_queue_is_shown_while_it_passes_and_booked_at_its_end(shoal: Any, service: Any) -> None:
    job = service.add_job()
    assert "100.0 %  in the queue" in shoal("goodput", job.id).out
    assert shoal("goodput", job.id, "--json").json()["total"] == 0
    shoal("pause", job.id)
    assert shoal("goodput", job.id, "--json").json()["seconds"]["queued"] > 0


def test_show_has_the_goodput_in_a_line(shoal: Any, trained: Any) -> None:
    assert "75.0%" in shoal("show", trained()).out


def test_show_says_what_a_lost_node_costs(shoal: Any, trained: Any) -> None:
    text = " ".join(shoal("show", trained()).out.split())
    assert "in memory of each worker, after every step, 0.40% of the step time" in text
    assert "if a node is lost repeats at most 24 steps, 7 now (copies on other nodes after every 20 steps;" in text
    assert "if a worker dies repeats at most 3 steps: torch.optim.Muon is not elementwise" in text


def test_an_incident_shows_the_bound_that_was_in_force(shoal: Any, trained: Any) -> None:
    assert "losing a node repeats at most 24 steps, 7 now" in " ".join(shoal("incidents", trained(), "1").out.split())


def test_incidents_are_listed_with_action_and_cost(shoal: Any, trained: Any) -> None:
    job_id = trained()
    text = shoal("incidents", job_id).out
    for word in ("1.1", "restart process, shrink", "4 -> 3", "memory", "3.0 MiB", "400 ms", "open"):
        assert word in text
    assert [one["id"] for one in shoal("incidents", job_id, "--json").json()] == [1, 2]


@pytest.mark.parametrize("name", ["1", "1.1"])
def test_one_incident_is_shown_with_the_duration_of_its_phases(shoal: Any, trained: Any, name: str) -> None:
    job_id = trained()
    text = shoal("incidents", job_id, name).out
    for word in ("run call", "fsdp4 -> fsdp3", "quiesce", "first step", "█" * 60, "recovered 400 ms after detection"):
        assert word in text
    assert shoal("incidents", job_id, name, "--json").json()["bytes_moved"] == 3 * 2**20
    assert "no phase is complete yet" in shoal("incidents", job_id, "2").out


def test_an_incident_that_does_not_exist_ends_with_4_and_names_those_that_do(shoal: Any, trained: Any) -> None:
    ran = shoal("incidents", trained(), "7")
    assert ran.code == 4
    assert "1.1, 1.2" in ran.err


def test_equal_losses_are_bit_identical_and_end_with_0(shoal: Any, trained: Any) -> None:
    ran = shoal("parity", trained(3.0, 2.0), "--against", trained(3.0, 2.0))
    assert ran.code == 0
    assert "BIT-IDENTICAL" in ran.out and "first step that differs" in ran.out


def test_losses_over_the_tolerance_end_with_1_and_name_the_steps(shoal: Any, trained: Any) -> None:
    job, other = trained(3.0, 2.0, 1.0, name="a", seed=1), trained(3.0, 2.0, 1.1, 0.5, name="b")
    ran = shoal("parity", "a", "--against", "b")
    assert ran.code == 1
    for word in ("NO PARITY", "0.0909 at step 3", "0.1 at step 3", f"1 only in {other}", "seed"):
        assert word in ran.out
    assert shoal("parity", job, "--against", other, "--tolerance", "0.2").code == 1, "one has a step more"
    third = trained(3.0, 2.0, 1.1, name="c")
    assert shoal("parity", job, "--against", third, "--tolerance", "0.2").code == 0
    ran = shoal("parity", job, "--against", other, "--json")
    assert ran.code == 1
    assert ran.json()["first_step_over_tolerance"] == 3


def test_jobs_without_a_common_step_have_no_parity(shoal: Any, trained: Any) -> None:
    ran = shoal("parity", trained(1.0), "--against", trained())
    assert ran.code == 1
    assert "NOTHING TO COMPARE" in ran.out
