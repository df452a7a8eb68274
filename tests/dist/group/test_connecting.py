"""A rank dies or stops while the ranks connect to each other; the others leave at once, and at the latest after the
time limit of connecting, not after the ten minutes of a collective."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_workers.contract.messages import ExitKind

SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "stop": {"steps": 3},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
}
SHIPPED_COLLECTIVE_S = 600.0


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("phase", ["connecting", "published"])
def test_survivors_of_a_rank_lost_while_it_connects_leave_and_re_form(make_job: Any, phase: str, action: str) -> None:
    """`published`: its address is in the store, and it connects to no other rank."""
    job = make_job(**SPEC)
    workers = job.workers(4)
    victim, survivors = workers[2], [workers[0], workers[1], workers[3]]
    assert [worker.call("prepare") for worker in workers] == [None] * 4
    victim.strike(phase, 0, action)
    for worker in survivors:
        worker.strike("published", 0, "report")
    job.start(workers, collective_timeout_s=SHIPPED_COLLECTIVE_S)
    for worker in survivors:
        worker.reached()
    assert victim.died() if action == "kill" else victim.reached()
    exits = job.interrupt(survivors)
    assert {one.kind for one in exits} <= {ExitKind.INTERRUPTED, ExitKind.FORM_FAILED}
    job.finish(survivors)


@pytest.mark.parametrize(
    ("phase", "messages"),
    [
        ("connecting", ("connected to this one within 2 s",)),
        # gloo lets one rank of a pair connect and the other accept; who connects to the stopped rank does not notice it
        ("published", ("connected to this one within 2 s", "did not arrive (listening) within 2 s")),
    ],
)
def test_connecting_fails_after_its_own_time_limit(make_job: Any, phase: str, messages: tuple[str, ...]) -> None:
    job = make_job(**SPEC)
    workers = job.workers(3)
    assert [worker.call("prepare") for worker in workers] == [None] * 3
    workers[2].strike(phase, 0, "stop")
    job.start(workers, collective_timeout_s=SHIPPED_COLLECTIVE_S, connect_timeout_s=2.0, store_timeout_s=600.0)
    for end in [worker.exit() for worker in workers[:2]]:
        assert end.kind is ExitKind.FORM_FAILED
        assert any(message in end.error.message for message in messages), end.error.message


def test_a_collective_may_take_longer_than_connecting(make_job: Any) -> None:
    job = make_job(**SPEC)
    workers = job.workers(3)
    workers[1].strike("backward", 1, "hold")
    job.start(workers, connect_timeout_s=5.0, collective_timeout_s=SHIPPED_COLLECTIVE_S)
    workers[1].reached()
    assert not workers[0].has_exit.wait(7.0), "a collective ended with the limit of connecting"
    workers[1].call("go")
    assert [worker.exit().kind for worker in workers] == [ExitKind.FINISHED] * 3
