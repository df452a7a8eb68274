"""Old records of the audit are deleted by age alone, never young ones, and the deletion is a record itself."""

import asyncio
import contextvars

import pytest

from shoal_service.clock import SystemClock
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.core.retention import RetentionRules
from shoal_service.settings import SettingsError, load_settings
from shoal_service.store import Store, audit
from shoal_service.store.audit import AuditQuery, Deed
from shoal_service.telemetry.tallies import RemovalTallies

DAY = 86_400.0


def _note(store: Store, now: float, days_ago: float, actor: str) -> None:
    deed = Deed(at=now - days_ago * DAY, address="10.0.0.1", operation="POST /v1/jobs", path="/v1/jobs", actor=actor)
    contextvars.copy_context().run(store.writing(audit.record_refusal), deed, "done")


def test_old_records_go_once_a_day_and_leave_one(store: Store) -> None:
    clock = SystemClock()
    now = clock.time()
    for days, actor in ((400, "ada"), (370, "eve"), (365.5, "bob"), (364, "new")):
        _note(store, now, days, actor)
    config = RetentionConfig(rules=RetentionRules(audit_days=365))
    collector = RetentionCollector(store, JobStorage(""), clock, config, RemovalTallies())

    planned = asyncio.run(collector.collect(dry_run=True, within_s=10, limit=10))
    assert [one.kind.value for one in planned.removals] == ["audit"]
    assert len(store.reading(audit.read)(AuditQuery())) == 4, "a dry run deletes nothing"
    done = asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10))
    assert [(one.kind.value, one.rows) for one in done.removals] == [("audit", 3)]
    newest, kept = store.reading(audit.read)(AuditQuery())
    assert kept.actor == "new"
    assert (newest.actor, newest.operation) == ("retention", "retention of the audit")
    assert newest.path.startswith("3 records before 20") and "retain_audit_days, 365" in newest.path
    _note(store, now, 365.5, "just now too old")
    again = asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10))
    assert again.removals == (), "not a deletion, and a record of it, for each record that becomes too old"


def test_for_ever_is_a_choice_and_days_are_not(store: Store) -> None:
    _note(store, SystemClock().time(), 4000, "ada")
    config = RetentionConfig(rules=RetentionRules(audit_days=0))
    collector = RetentionCollector(store, JobStorage(""), SystemClock(), config, RemovalTallies())
    assert asyncio.run(collector.collect(dry_run=False, within_s=10, limit=10)).removals == ()
    assert load_settings(retain_audit_days=0).retention.audit_days == 0
    assert load_settings(retain_audit_days=30).retention.audit_days == 30
    with pytest.raises(SettingsError, match="kept for 30 days at least"):
        load_settings(retain_audit_days=29)
