"""The table of faults has a row for every cause, and the consequences of a cause are those of its row."""

from __future__ import annotations

from kit.sources import sources
from shoal_service.core.attempt.faults import CAUSE_BY_EXIT, FAULTS, Blame, Memory, Probation, describe_action
from shoal_workers.contract.job import IncidentCause


def test_every_cause_has_a_row_with_words() -> None:
    assert list(FAULTS) == list(IncidentCause)
    for fault in FAULTS.values():
        assert fault.description and fault.witness
        assert not fault.description.endswith(".") and "|" not in fault.description + fault.witness


def test_each_way_to_leave_run_reports_one_cause() -> None:
    kinds = [fault.exit_kind for fault in FAULTS.values() if fault.exit_kind is not None]
    assert len(kinds) == len(set(kinds)) == len(CAUSE_BY_EXIT)


def test_every_cause_is_detected_somewhere() -> None:
    text = "".join(text for path, text in sources("service", "workers").items() if path.name != "table.py")
    undetected = [cause for cause in IncidentCause if f"IncidentCause.{cause.name}" not in text]
    assert [cause for cause in undetected if FAULTS[cause].exit_kind is None] == []


def test_a_cause_without_blame_loses_no_worker_and_suspects_no_node() -> None:
    for fault in FAULTS.values():
        if fault.blames is Blame.UNKNOWN:
            assert fault.probation is Probation.NEVER and not fault.is_death and not fault.is_preemption_after_notice


def test_the_snapshots_of_these_causes_are_not_trusted() -> None:
    distrusted = {cause for cause, fault in FAULTS.items() if fault.memory is Memory.DISTRUSTED}
    assert distrusted == {IncidentCause.CORRUPTED, IncidentCause.NON_FINITE}


def test_the_nodes_of_these_causes_are_suspected() -> None:
    suspected = {cause for cause, fault in FAULTS.items() if fault.probation in (Probation.ALONE, Probation.ALWAYS)}
    assert suspected == {
        IncidentCause.WORKER_FAULT,
        IncidentCause.STUCK,
        IncidentCause.HUNG,
        IncidentCause.UNREACHABLE,
        IncidentCause.NODE_DIED,
        IncidentCause.CORRUPTED,
        IncidentCause.STRAGGLER,
    }


def test_the_words_name_the_replacement() -> None:
    died = IncidentCause.WORKER_DIED
    assert describe_action(died, 4, None, num_spares=0) == "restart worker"
    assert describe_action(died, 4, 3, num_spares=0) == "restart worker, shrink"
    assert describe_action(died, 4, 4, num_spares=1) == "restart worker, replace from standby"
    assert describe_action(IncidentCause.NODE_DIED, 4, 3, num_spares=1) == "exclude node, replace from standby, shrink"
    assert describe_action(IncidentCause.COLLECTIVE_FAILED, 4, 4, num_spares=0) == "re-form"
