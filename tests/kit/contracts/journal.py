"""What every supervisor Journal does."""

import pytest

from doubles.fake_journal import Replaced
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.supervisor.protocols import Journal
from shoal_service.supervisor.supervisor import new_attempt
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
        first.begin(1.0)
        first.write(entry(1))
        first.write(entry(2))
        assert self.open().read() == entry(2)

    def test_starts_are_counted_over_all_supervisors_of_the_attempt(self) -> None:
        assert self.open().begin(1.0).starts == [1.0]
        assert self.open().begin(2.5).starts == [1.0, 2.5]

    def test_the_current_supervisor_passes_the_fence(self) -> None:
        journal = self.open()
        journal.begin(1.0)
        journal.require_current()

    def test_a_supervisor_with_a_successor_does_not_pass_the_fence(self) -> None:
        journal = self.open()
        journal.begin(1.0)
        self.open().begin(2.0)
        with pytest.raises(Replaced):
            journal.require_current()

    def test_a_supervisor_of_a_removed_attempt_does_not_pass_the_fence(self) -> None:
        journal = self.open()
        journal.begin(1.0)
        self.open().delete()
        with pytest.raises(Replaced):
            journal.require_current()

    def test_a_deleted_journal_is_empty_and_deleting_it_again_does_nothing(self) -> None:
        journal = self.open()
        journal.begin(1.0)
        journal.write(entry(1))
        journal.delete()
        journal.delete()
        assert self.open().read() is None
        assert self.open().begin(3.0).starts == [3.0]

    def test_each_supervisor_has_a_life_of_its_own_which_grows(self) -> None:
        lives = [self.open().begin(float(number)).life for number in range(1, 4)]
        assert lives == [1, 2, 3]

    def test_what_a_replaced_supervisor_writes_is_not_read_by_its_successors(self) -> None:
        first, second = self.open(), self.open()
        first.begin(1.0)
        first.write(entry(1))
        assert second.begin(2.0).entry == entry(1)
        second.write(entry(2))
        first.write(entry(9))
        assert self.open().begin(3.0).entry == entry(2)

    def test_a_successor_obeys_no_older_control_plane_than_its_predecessor(self) -> None:
        first = self.open()
        assert first.begin(1.0).epoch == 0
        first.obey(7)
        assert self.open().begin(2.0).epoch == 7
