"""Nodes: suspicion and probation, silence, and the pauses before a dead one is started again."""

from dataclasses import replace

import pytest

from shoal_service.core import reachability
from shoal_service.core.attempt.state.parts import AvoidedNode
from shoal_service.core.node_restarts import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    NodeHistory,
)
from shoal_service.core.nodes import (
    MAX_TEST_DELAY_S,
    Cordon,
    Drain,
    Node,
    NodeSuspicion,
    avoided,
    described,
    next_test_delay_s,
    partner_for_test,
    probation_limit,
    usable,
    with_drains,
)
from shoal_service.core.reachability import PERIOD_S, Reach

DRAIN = Drain(reason="new disks", requested_at=1.0, deadline=60.0, source="api")
ALONE = NodeSuspicion(reason="computes wrong", since=2.0, next_test_at=602.0, job_ids=("j1",))
SUSPICION = replace(ALONE, job_ids=("j1", "j2"))


def node(name: str, *, alive: bool = True, cpus: float = 4.0, drain: Drain | None = None) -> Node:
    return Node(node_id=name, ip="10.0.0.1", alive=alive, cpus=cpus, gpus=0.0, memory_gib=8.0, drain=drain)


def test_a_drained_node_is_avoided_until_its_deadline_and_its_capacity_does_not_count() -> None:
    nodes = described([node("a"), node("b")], {"a": DRAIN}, {})
    assert nodes[0].drain == DRAIN and nodes[1].drain is None
    assert avoided(nodes) == (AvoidedNode(node_id="a", reason="drained: new disks", deadline=60.0),)
    assert [n.node_id for n in usable(nodes)] == ["b"]


def test_a_cordoned_node_keeps_its_workers_and_its_capacity() -> None:
    cordoned = node("a").model_copy(update={"cordon": Cordon(reason="bad fan", requested_at=1.0)})
    nodes = (cordoned, node("b"))
    assert avoided(nodes) == (AvoidedNode(node_id="a", reason="cordoned: bad fan", keeps_workers=True),)
    assert usable(nodes) == nodes == usable(nodes, ["j1"])
    both = cordoned.model_copy(update={"drain": DRAIN})
    assert not avoided((both,))[0].keeps_workers, "a drain is more than a cordon"


def test_a_suspected_node_is_avoided_without_a_deadline() -> None:
    nodes = described([node("a"), node("b")], {}, {"b": SUSPICION})
    assert (nodes[1].suspected, nodes[1].suspected_since, nodes[1].next_test_at) == ("computes wrong", 2.0, 602.0)
    assert avoided(nodes) == (AvoidedNode(node_id="b", reason="on probation: computes wrong", is_suspected=True),)
    cordoned = nodes[1].model_copy(update={"cordon": Cordon(reason="bad fan", requested_at=1.0)})
    assert not avoided((nodes[0], cordoned))[0].is_suspected, "a cordon keeps every new worker away"


def test_suspected_nodes_are_used_if_there_is_no_other() -> None:
    only = described([node("a")], {}, {"a": SUSPICION})
    assert avoided(only) == () and usable(only) == only
    assert only[0].suspected == "computes wrong (still used, since no other node is sound)"
    beside_a_head = described([node("head", cpus=0.0), node("a"), node("gone", alive=False)], {}, {"a": SUSPICION})
    assert avoided(beside_a_head) == ()
    beside_a_drained_one = described([node("a"), node("b")], {"b": DRAIN}, {"a": SUSPICION})
    assert [n.node_id for n in avoided(beside_a_drained_one)] == ["b"]


def test_a_suspicion_of_one_job_puts_no_node_on_probation_for_others() -> None:
    nodes = described([node("a"), node("b")], {}, {"b": ALONE})
    assert avoided(nodes) == () == avoided(nodes, "j2") and not nodes[1].on_probation
    reason = "suspected by this job: computes wrong"
    assert avoided(nodes, "j1") == (AvoidedNode(node_id="b", reason=reason, is_suspected=True),)
    assert nodes[1].suspected == "computes wrong" and nodes[1].suspected_by == ("j1",)


def test_the_evidence_of_two_jobs_or_a_failed_test_puts_a_node_on_probation() -> None:
    for evidence in (SUSPICION, replace(ALONE, num_tests=1)):
        nodes = described([node("a"), node("b")], {}, {"b": evidence})
        assert nodes[1].on_probation and [n.node_id for n in avoided(nodes, "j3")] == ["b"]


def test_a_job_uses_the_node_that_it_suspects_if_there_is_no_other() -> None:
    nodes = described([node("a"), node("b")], {}, {"a": ALONE, "b": ALONE})
    assert avoided(nodes, "j1") == ()
    beside_one_on_probation = described([node("a"), node("b")], {}, {"a": ALONE, "b": SUSPICION})
    assert [n.node_id for n in avoided(beside_one_on_probation, "j1")] == ["b"]


def test_capacity_counts_for_the_jobs_that_may_use_it() -> None:
    nodes = described([node("a"), node("b")], {}, {"b": ALONE})
    assert [n.node_id for n in usable(nodes, ["j1", "j2"])] == ["a", "b"]
    assert [n.node_id for n in usable(nodes, ["j1"])] == ["a"]
    assert [n.node_id for n in usable(nodes)] == ["a", "b"]


def test_an_operator_limits_the_nodes_on_probation() -> None:
    suspicions = {
        "a": replace(SUSPICION, since=5.0),
        "b": replace(SUSPICION, since=1.0),
        "c": replace(ALONE, since=9.0, num_tests=1),
    }
    nodes = described([node(name) for name in "abcd"], {}, suspicions, "2")
    assert [n.node_id for n in nodes if n.on_probation] == ["b", "c"], "a failed test first, then the oldest evidence"
    assert "max_probation 2 of 4 nodes is reached" in nodes[0].suspected
    assert [n.node_id for n in avoided(nodes, "j9")] == ["b", "c"]
    assert [n.node_id for n in avoided(nodes, "j1")] == ["a", "b", "c"], "its own suspicion still counts"
    assert not any(n.on_probation for n in described(nodes, {}, suspicions, "0"))


@pytest.mark.parametrize(
    ("limit", "num_nodes", "allowed"),
    [("25%", 3, 1), ("25%", 8, 2), ("100%", 3, 3), ("0%", 9, 0), ("0", 9, 0), ("4", 2, 4)],
)
def test_the_limit_is_a_number_or_a_share_of_at_least_one(limit: str, num_nodes: int, allowed: int) -> None:
    assert probation_limit(limit, num_nodes) == allowed


@pytest.mark.parametrize("limit", ["many", "-1", "150%", "1.5"])
def test_another_limit_is_refused_by_name(limit: str) -> None:
    with pytest.raises(ValueError, match=r"max_probation|could not convert"):
        probation_limit(limit, 4)


def test_a_drain_is_an_order_even_if_no_node_is_left() -> None:
    nodes = described([node("a")], {"a": DRAIN}, {})
    assert [n.node_id for n in avoided(nodes)] == ["a"] and usable(nodes) == ()


def test_dead_nodes_need_not_be_avoided() -> None:
    assert avoided(described([node("a", alive=False), node("b")], {"a": DRAIN}, {"a": SUSPICION})) == ()


def test_a_drain_by_ray_takes_precedence_and_stays() -> None:
    rays = Drain(reason="drained by Ray", requested_at=5.0, source="ray")
    seen = [node("a", drain=rays), node("b", drain=DRAIN)]
    assert [n.drain for n in with_drains(seen, {"a": DRAIN})] == [rays, None]


def test_the_partner_of_a_test_is_a_sound_node() -> None:
    nodes = described([node("a"), node("b"), node("c"), node("head", cpus=0.0)], {"b": DRAIN}, {"a": SUSPICION})
    assert partner_for_test("a", nodes) == "c"
    assert partner_for_test("a", nodes[:2]) is None


def test_tests_that_fail_are_repeated_later_and_later() -> None:
    assert [next_test_delay_s(600.0, failed) for failed in range(4)] == [600.0, 1200.0, 2400.0, 4800.0]
    assert next_test_delay_s(600.0, 500) == MAX_TEST_DELAY_S
    assert next_test_delay_s(10 * MAX_TEST_DELAY_S, 3) == 10 * MAX_TEST_DELAY_S


def test_a_node_that_runs_is_not_started() -> None:
    assert NodeHistory().next_start_mono is None
    assert NodeHistory().record_check(True, 10.0).next_start_mono is None


def test_a_dead_node_is_started_after_a_pause_from_its_death_on() -> None:
    dead = NodeHistory().record_check(True, 10.0).record_check(False, 50.0)
    assert dead.next_start_mono == 50.0 + FIRST_PAUSE_S
    assert dead.record_check(False, 52.0) == dead, "further checks do not put it off"


def test_the_pause_doubles_with_each_start_in_vain_up_to_a_limit() -> None:
    history, pauses = NodeHistory().record_check(False, 0.0), []
    for _ in range(20):
        at = history.next_start_mono
        assert at is not None and history.dead_since_mono is not None
        pauses.append(at - history.dead_since_mono)
        history = history.record_start(at).record_check(False, at + 1.0)
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_PAUSE_S and pauses == sorted(pauses)


def test_a_node_that_dies_soon_after_each_start_is_not_started_ever_faster() -> None:
    history = NodeHistory().record_check(False, 0.0).record_start(5.0).record_check(True, 6.0)
    history = history.record_check(False, 8.0)
    assert history.next_start_mono == 8.0 + 2 * FIRST_PAUSE_S


def test_a_steady_node_begins_with_the_first_pause_again() -> None:
    history = NodeHistory().record_check(False, 0.0).record_start(5.0).record_check(True, 6.0)
    history = history.record_check(True, 6.0 + STEADY_S).record_check(False, 400.0)
    assert history.next_start_mono == 400.0 + FIRST_PAUSE_S


TICK_S = 0.1


def probe(reach: Reach, *, now: float, until: float, answer_s: float | None) -> tuple[Reach, float]:
    """Connects as they are due; each is answered after `answer_s`. Stops when the host is silent."""
    under_way: list[float] = []
    while now < until and not reachability.is_silent(reach, now):
        if reachability.next_probe_at(reach, now) <= now:
            reach = reachability.probed(reach, now)
            under_way.append(now)
        if answer_s is not None:
            for made_at in [at for at in under_way if at + answer_s <= now]:
                reach = reachability.answered(reach, made_at, now)
                under_way.remove(made_at)
        now += TICK_S
    return reach, now


def healthy(answer_s: float = 0.0) -> Reach:
    reach, now = probe(Reach(), now=0.0, until=20.0, answer_s=answer_s)
    assert now >= 20.0
    return reach


def test_a_host_that_is_cut_off_is_silent_within_two_and_a_half_seconds() -> None:
    cut_at = 20.0
    reach, now = probe(healthy(), now=cut_at, until=60.0, answer_s=None)
    assert reachability.is_silent(reach, now)
    assert now - cut_at <= PERIOD_S + reachability.THRESHOLD_S + reachability.LATE_S + 2 * TICK_S


def test_a_host_whose_answers_take_long_gets_more_time() -> None:
    slow = healthy(answer_s=0.3)
    reach, now = probe(slow, now=20.0, until=60.0, answer_s=None)
    assert reachability.is_silent(reach, now) and now - 20.0 > 5.0


def test_one_lost_packet_is_not_a_silence() -> None:
    reach = reachability.probed(healthy(), 20.0)
    reach, now = probe(reach, now=20.5, until=30.0, answer_s=0.0)
    assert now >= 30.0 and not reachability.is_silent(reach, now)


def test_a_prober_that_had_no_cpu_suspects_no_host() -> None:
    reach = reachability.probed(healthy(), 20.0)
    assert not reachability.is_silent(reach, 30.0), "one connect, made before the prober was away"
    assert reachability.next_probe_at(reach, 30.0) <= 30.0


def test_a_host_that_never_answered_is_not_judged() -> None:
    reach, now = probe(Reach(), now=0.0, until=60.0, answer_s=None)
    assert now >= 60.0 and reachability.silent_nodes({"a": reach}, now, own="me", head="me") == {}


def test_a_silent_host_that_answers_is_not_silent_any_more() -> None:
    reach = Reach(has_answered=True, silent_because="no answer", unanswered=(1.0, 2.0))
    assert reachability.silent_nodes({"a": reach, "b": healthy()}, 20.0, own="me", head="b") == {"a": "no answer"}
    back = reachability.answered(reach, 2.0, 2.1)
    assert not reachability.is_silent(back, 20.0) and back.unanswered == ()


def test_what_is_remembered_of_a_long_silence_is_bounded() -> None:
    reach = healthy()
    for number in range(1000):
        reach = reachability.probed(reach, 20.0 + number)
    assert len(reach.unanswered) < 20 and reachability.is_silent(reach, 1021.0)


@pytest.mark.parametrize(
    ("silent", "own", "head", "found"),
    [
        (("a",), "me", "h", ("a",)),
        (("a", "h"), "me", "h", ("a", "h")),
        (("a", "b", "h"), "me", "h", ()),  # this process's host is the one that is cut off
        (("a", "b", "h"), "h", "h", ("a", "b", "h")),  # the part of the cluster with the head goes on
    ],
)
def test_a_host_that_is_cut_off_itself_accuses_no_other(
    silent: tuple[str, ...], own: str, head: str, found: tuple[str, ...]
) -> None:
    gone, _ = probe(healthy(), now=20.0, until=60.0, answer_s=None)
    hosts = {name: gone if name in silent else healthy() for name in ("a", "b", "h")}
    assert tuple(sorted(reachability.silent_nodes(hosts, 25.0, own=own, head=head))) == found


def test_what_was_silent_before_stays_silent_while_this_host_is_cut_off() -> None:
    gone, _ = probe(healthy(), now=20.0, until=60.0, answer_s=None)
    known = Reach(has_answered=True, silent_because="no answer")
    assert reachability.silent_nodes({"a": known, "h": gone}, 25.0, own="me", head="h") == {"a": "no answer"}
