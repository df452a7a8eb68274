"""The process that waits for the next supervisor: when it is started, on which node, and for whom it is used."""

from shoal_service.gateway.prestart import SETTLE_S, SupervisorReserve

KEEP_S = 600.0
NODES = ["n1", "n2", "n3"]


def reserve() -> SupervisorReserve:
    """One supervisor was started at time 0."""
    found = SupervisorReserve(KEEP_S)
    assert not found.is_due(1e9), "nothing is started before there is a job"
    assert found.take("env", NODES, 0.0) == ""
    return found


def test_a_process_is_started_a_while_after_the_last_supervisor_and_used_once() -> None:
    kept = reserve()
    assert kept.renew(NODES, SETTLE_S - 0.1) is None
    assert kept.renew(NODES, SETTLE_S) == ("n1", "env")
    assert not kept.is_due(SETTLE_S + 1)
    assert kept.take("env", NODES, 10.0) == "n1"
    assert kept.take("env", NODES, 10.1) == "", "it is used up"


def test_the_next_one_is_on_another_node() -> None:
    kept = reserve()
    used = []
    for at in range(5):
        assert kept.renew(NODES, 100.0 * at + SETTLE_S) is not None
        used.append(kept.take("env", NODES, 100.0 * at + 50))
    assert used == ["n1", "n2", "n3", "n1", "n2"]


def test_it_is_kept_for_a_supervisor_that_may_use_it() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.take("env", ["n2"], 10.0) == "", "its node is avoided"
    assert kept.take("env", NODES, 11.0) == "n1"


def test_it_is_replaced_before_it_ends_and_with_its_node() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.renew(NODES, SETTLE_S + KEEP_S - 30) is None
    assert kept.renew(NODES, SETTLE_S + KEEP_S - 20) == ("n2", "env")
    assert kept.take("env", NODES, SETTLE_S + 2 * KEEP_S) == "", "it has ended by then"
    other = reserve()
    other.renew(NODES, SETTLE_S)
    assert other.take("env", ["n2"], 10.0) == ""
    assert other.renew(["n2"], 20.0) == ("n2", "env"), "its node has gone"


def test_a_supervisor_with_another_environment_does_not_use_it() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.take("other", NODES, 10.0) == ""
    assert kept.renew(NODES, 20.0) == ("n2", "other"), "the next one is expected to be like the last"
