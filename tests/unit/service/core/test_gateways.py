"""Which gateway speaks for a cluster: every combination of who spoke and who reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal_service.core.gateways import SILENT_S, Incoming, Speaker, Verdict, admit

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
