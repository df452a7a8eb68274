"""Which gateway speaks for a cluster: every combination of who spoke and who reports."""

from dataclasses import replace

import pytest

from shoal_service.core.gateways import (
    JOBS_SILENT_S,
    SILENT_S,
    HangLimits,
    Incoming,
    Speaker,
    Verdict,
    WatchedGateway,
    admit,
    hangs,
    replaced,
    watched,
)

NOW = 1_000.0
SPEAKER = Speaker(life="a" * 16, token_id="token-1", number=7, reported_at=NOW - 1.0)
SAME = Incoming(life="a" * 16, token_id="token-1", number=8, takes_over=True)
OTHER = Incoming(life="b" * 16, token_id="token-1", number=1, takes_over=False)


@pytest.mark.parametrize(
    ("speaker", "incoming", "verdict"),
    [
        (replace(SPEAKER, life=""), OTHER, Verdict.NEW_LIFE),
        (SPEAKER, SAME, Verdict.NEWER),
        (SPEAKER, replace(SAME, number=7), Verdict.REPEATED),
        (SPEAKER, replace(SAME, number=3), Verdict.REPEATED),
        (SPEAKER, OTHER, Verdict.REFUSED),
        (SPEAKER, replace(OTHER, takes_over=True), Verdict.NEW_LIFE),
        (SPEAKER, replace(OTHER, takes_over=True, token_id="token-2"), Verdict.REFUSED),
        (replace(SPEAKER, reported_at=NOW - SILENT_S), OTHER, Verdict.NEW_LIFE),
        (replace(SPEAKER, reported_at=NOW - SILENT_S + 0.1), OTHER, Verdict.REFUSED),
        (replace(SPEAKER, reported_at=NOW + 3_600.0), OTHER, Verdict.NEW_LIFE),
    ],
)
def test_one_life_at_a_time_speaks_for_a_cluster(speaker: Speaker, incoming: Incoming, verdict: Verdict) -> None:
    found = admit("east", speaker, incoming, NOW)
    assert found.verdict is verdict and found.reason


def test_a_refusal_says_what_to_do() -> None:
    reason = admit("east", SPEAKER, OTHER, NOW).reason
    assert "cluster 'east'" in reason and "1.0 s ago" in reason and "--name" in reason


A, B = "a1" * 28, "b2" * 28
"""Ids of two Ray clusters."""
OF_A = replace(SPEAKER, ray_cluster=A)
SILENT = replace(OF_A, reported_at=NOW - SILENT_S)
OF_B = Incoming(life="b" * 16, token_id="token-1", number=1, takes_over=True, ray_cluster=B)
FOREIGN = replace(OF_B, token_id="token-2")


@pytest.mark.parametrize(
    ("speaker", "incoming", "verdict", "words"),
    [
        (OF_A, replace(OF_B, ray_cluster=A), Verdict.NEW_LIFE, "has started again"),
        (SPEAKER, OF_B, Verdict.NEW_LIFE, "has started again"),  # the id of the one before is not known
        (OF_A, OF_B, Verdict.REFUSED, "has reported 1.0 s ago"),
        (SILENT, OF_B, Verdict.NEW_LIFE, "is gone"),
        (replace(OF_A, life=""), OF_B, Verdict.NEW_LIFE, "is gone"),
        (replace(SILENT, jobs_reported_at=NOW - 1.0), OF_B, Verdict.REFUSED, "Jobs train in the Ray cluster"),
        (replace(SILENT, jobs_reported_at=NOW - JOBS_SILENT_S), OF_B, Verdict.NEW_LIFE, "is gone"),
        (OF_A, FOREIGN, Verdict.BARRED, "--replace"),
        (SILENT, FOREIGN, Verdict.BARRED, "--name"),
        (replace(SILENT, life=""), FOREIGN, Verdict.BARRED, "a1a1a1a1"),
        (OF_A, replace(FOREIGN, replaces=True), Verdict.REFUSED, "has reported 1.0 s ago"),
        (SILENT, replace(FOREIGN, replaces=True), Verdict.NEW_LIFE, "is gone"),
        # It does not know its Ray cluster yet.
        (OF_A, replace(OF_B, ray_cluster=""), Verdict.REFUSED, "Another gateway speaks"),
        (SILENT, replace(OF_B, ray_cluster=""), Verdict.NEW_LIFE, "was silent"),
        (SILENT, replace(FOREIGN, ray_cluster=""), Verdict.REFUSED, "until its Ray cluster answers"),
        (SILENT, replace(FOREIGN, ray_cluster="", replaces=True), Verdict.REFUSED, "until its Ray cluster answers"),
        # Its head was started anew, without its tables.
        (OF_A, replace(SAME, ray_cluster=B), Verdict.NEWER, "is gone"),
        (replace(OF_A, jobs_reported_at=NOW - 1.0), replace(SAME, ray_cluster=B), Verdict.REFUSED, "Jobs train"),
        (OF_A, replace(SAME, ray_cluster=B, number=7), Verdict.REPEATED, "is stored"),
        (OF_A, SAME, Verdict.NEWER, "after 7"),
    ],
)
def test_a_name_is_that_of_one_ray_cluster(speaker: Speaker, incoming: Incoming, verdict: Verdict, words: str) -> None:
    found = admit("east", speaker, incoming, NOW)
    assert found.verdict is verdict and words in found.reason


LIMITS = HangLimits()


def after_silence(gateway: WatchedGateway, silent_s: float) -> WatchedGateway:
    """The newest report stays the one of the first look, in looks of one second."""
    for _ in range(int(silent_s) + 1):
        gateway = watched(gateway, ("a" * 16, 7), 1.0)
    return gateway


def test_a_gateway_that_has_reported_and_is_silent_hangs() -> None:
    reporting = watched(after_silence(WatchedGateway(), 0.0), ("a" * 16, 8), 1.0)
    assert reporting.has_reported and not hangs(reporting, LIMITS)
    for number in range(9, 100):
        reporting = watched(reporting, ("a" * 16, number), 1.0)
        assert not hangs(reporting, LIMITS)
    silent = reporting
    for _ in range(int(LIMITS.silent_s) - 1):
        silent = watched(silent, ("a" * 16, 99), 1.0)
        assert not hangs(silent, LIMITS)
    silent = watched(silent, ("a" * 16, 99), 1.0)
    assert hangs(silent, LIMITS) == "its process lives and has not reported for 15 s: it hangs"


def test_a_gateway_that_stands_by_for_another_one_does_not_hang() -> None:
    gateway = WatchedGateway()
    for number in range(1_000):
        gateway = watched(gateway, ("b" * 16, number), 1.0)
        assert not hangs(gateway, LIMITS)


def test_a_gateway_that_starts_has_more_time() -> None:
    starting = after_silence(WatchedGateway(), LIMITS.start_s - 1.0)
    assert not hangs(starting, LIMITS)
    assert hangs(after_silence(WatchedGateway(), LIMITS.start_s), LIMITS).endswith("120 s since its start: it hangs")


def test_each_one_that_was_killed_in_vain_gives_the_next_one_more_time_until_one_reports() -> None:
    limits_s = []
    gateway = WatchedGateway()
    for _ in range(5):
        gateway = watched(gateway, ("a" * 16, 7), 1.0)
        while not hangs(gateway, LIMITS):
            gateway = watched(gateway, ("a" * 16, 7), 1.0)
        limits_s.append(gateway.silent_s)
        gateway = replaced(gateway)
    assert limits_s == [120.0, 240.0, 480.0, 600.0, 600.0]
    gateway = watched(watched(gateway, ("a" * 16, 7), 1.0), ("c" * 16, 1), 1.0)
    assert gateway.num_killed == 0
