"""What every supervisor Journal does."""

from __future__ import annotations

import pytest

from doubles.fake_journal import Replaced
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.supervisor.new_attempt import new_attempt
from shoal_service.supervisor.protocols import Journal
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.spec import JobSpec

SPEC = JobSpec.model_validate({"stop": {"steps": 4}, "task": "m:T"})
CONFIG = SupervisorConfig(job_id="j1", attempt=1, spec=SPEC, checkpoint_root="/c", granted=2, epoch=1, spec_version=1)


def entry(seq: int) -> JournalEntry:
    event = PendingEvent(at=1.0, type="worker.started", data={"pid": seq})
    return JournalEntry(
        state=new_attempt(CONFIG, 1.0),
        seq=seq,
        unacknowledged=(Unacknowledged(seq=seq, item=event),),
        end=AttemptEnd(reason=EndReason.FINISHED, message="done", step=4),
    )


class JournalContract:
    def open(self) -> Journal:
        """The journal of one attempt, as another start of its supervisor opens it. One attempt per test."""
        raise NotImplementedError

    def test_a_journal_is_empty_until_the_first_write(self) -> None:
        assert self.open().read() is None

    def test_the_next_supervisor_reads_the_newest_entry(self) -> None:
        first = self.open()
        first.record_start(1.0)
        first.write(entry(1))
        first.write(entry(2))
        assert self.open().read() == entry(2)

    def test_starts_are_counted_over_all_supervisors_of_the_attempt(self) -> None:
        assert self.open().record_start(1.0) == [1.0]
        assert self.open().record_start(2.5) == [1.0, 2.5]

    def test_the_current_supervisor_passes_the_fence(self) -> None:
        journal = self.open()
        journal.record_start(1.0)
        journal.require_current()

    def test_a_supervisor_with_a_successor_does_not_pass_the_fence(self) -> None:
        journal = self.open()
        journal.record_start(1.0)
        self.open().record_start(2.0)
        with pytest.raises(Replaced):
            journal.require_current()

    def test_a_supervisor_of_a_removed_attempt_does_not_pass_the_fence(self) -> None:
        journal = self.open()
        journal.record_start(1.0)
        self.open().delete()
        with pytest.raises(Replaced):
            journal.require_current()

    def test_a_deleted_journal_is_empty_and_deleting_it_again_does_nothing(self) -> None:
        journal = self.open()
        journal.record_start(1.0)
        journal.write(entry(1))
        journal.delete()
        journal.delete()
        assert self.open().read() is None
        assert self.open().record_start(3.0) == [3.0]
