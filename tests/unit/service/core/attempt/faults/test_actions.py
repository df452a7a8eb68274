"""The table of actions names every cause."""

from __future__ import annotations

from pathlib import Path

from shoal_service.core.attempt.faults.actions import RESPONSES, Suspicion, action_of
from shoal_workers.contract.job import IncidentCause

PAGE = Path(__file__).resolve().parents[6] / "docs" / "architecture.md"


def test_every_cause_has_a_response() -> None:
    assert set(RESPONSES) == set(IncidentCause)
    assert all(response.words for response in RESPONSES.values())


def test_the_nodes_of_these_causes_are_suspected() -> None:
    suspected = {cause for cause, response in RESPONSES.items() if response.suspicion is not Suspicion.NEVER}
    assert suspected == {
        IncidentCause.STUCK, IncidentCause.HUNG, IncidentCause.UNREACHABLE, IncidentCause.NODE_DIED,
        IncidentCause.CORRUPTED, IncidentCause.STRAGGLER,
    }  # fmt: skip


def test_the_words_say_how_the_gap_was_filled() -> None:
    died = IncidentCause.WORKER_DIED
    assert action_of(died, 4, None, num_spares=0) == "restart worker"
    assert action_of(died, 4, 3, num_spares=0) == "restart worker, shrink"
    assert action_of(died, 4, 4, num_spares=1) == "restart worker, replace from standby"
    assert action_of(IncidentCause.NODE_DIED, 4, 3, num_spares=1) == "exclude node, replace from standby, shrink"
    assert action_of(IncidentCause.COLLECTIVE_FAILED, 4, 4, num_spares=0) == "re-form"


def test_the_table_in_the_docs_is_this_one() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for cause, response in RESPONSES.items():
        assert f"| `{cause}` | {response.action} | {response.suspicion} | {response.words} |" in lines
