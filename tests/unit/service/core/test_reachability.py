"""Which hosts are silent: decided from connects that were made, and answers that were seen."""

import pytest

from shoal_service.core import reachability
from shoal_service.core.reachability import PERIOD_S, Reach

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
