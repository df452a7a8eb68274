"""The journal while the Ray head is away; the rest is in its contract (tests/kit/contracts/journal.py)."""

import threading
import time
from typing import Any

import pytest

from doubles.fake_journal import Replaced
from doubles.fake_key_values import FakeKeyValueStore
from kit.contracts.journal import entry
from shoal_service.home import Home
from shoal_service.reports import PendingEvent
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.copies import StoredConfig
from shoal_service.supervisor.journal import GcsJournal, JournalFailed, Unacknowledged
from shoal_workers.contract.checks.spec_errors import parse_spec

_PATIENCE_S = 60.0


def journal(store: FakeKeyValueStore, *, on_replaced: threading.Event | None = None) -> GcsJournal:
    def replaced() -> None:
        if on_replaced is not None:
            on_replaced.set()
            threading.Event().wait()  # the real one ends the process
        raise Replaced

    return GcsJournal(store, "j1", 1, on_replaced=replaced)


@pytest.mark.timeout(120)
def test_a_write_goes_ahead_without_the_head_and_the_newest_entry_is_written_when_it_is_back() -> None:
    store = FakeKeyValueStore()
    mine = journal(store)
    mine.begin(1.0)
    mine.write(entry(1))
    store.is_away = True
    mine.write(entry(2))
    began = time.monotonic()
    for number in range(3, 103):
        mine.write(entry(number))
    assert time.monotonic() - began < 12.0, "only the first write waits: a quarter of a second"
    store.is_away = False
    deadline = time.monotonic() + _PATIENCE_S
    while journal(store).read() != entry(102):
        assert time.monotonic() < deadline
        store.refused.wait(0.01)


@pytest.mark.timeout(120)
def test_a_supervisor_that_was_cut_off_does_not_overwrite_its_successor_s_entry() -> None:
    store, replaced = FakeKeyValueStore(), threading.Event()
    mine = journal(store, on_replaced=replaced)
    mine.begin(1.0)
    store.is_away = True
    mine.write(entry(1))
    successor = FakeKeyValueStore()  # on a node that reaches the head
    successor.values = store.values
    other = journal(successor)
    other.begin(2.0)
    other.write(entry(9))
    store.is_away = False
    assert replaced.wait(_PATIENCE_S)
    assert other.read() == entry(9)


@pytest.mark.timeout(120)
def test_reading_waits_for_the_head() -> None:
    store = FakeKeyValueStore()
    store.is_away = True
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(journal(store).read()))
    reader.start()
    assert store.refused.wait(_PATIENCE_S) and found == []
    store.is_away = False
    reader.join(_PATIENCE_S)
    assert found == [None]


def test_deleting_without_the_head_leaves_the_entry_and_does_not_wait() -> None:
    store = FakeKeyValueStore()
    mine = journal(store)
    mine.begin(1.0)
    store.is_away = True
    mine.delete()
    assert store.values


class Slow(FakeKeyValueStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_store = threading.Event(), threading.Event()

    def put(self, key: bytes, value: bytes) -> None:
        self.asked.set()
        assert self.may_store.wait(_PATIENCE_S)
        super().put(key, value)


@pytest.mark.timeout(120)
def test_a_record_that_is_sent_for_longer_than_the_deletion_waits_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal_service.supervisor.journal._LAST_RECORD_S", 0.0)
    store = Slow()
    mine = journal(store)
    mine.begin(1.0)
    mine.write(entry(1), wait=False)
    assert store.asked.wait(_PATIENCE_S)
    mine.delete()
    store.may_store.set()
    mine.write(entry(2))  # waits for the one before
    assert store.values == {}


@pytest.mark.timeout(120)
def test_an_entry_that_is_being_sent_does_not_arrive_after_the_journal_was_deleted() -> None:
    store = Slow()
    mine = journal(store)
    mine.begin(1.0)
    mine.write(entry(1), wait=False)
    assert store.asked.wait(_PATIENCE_S)
    deleting = threading.Thread(target=mine.delete)
    deleting.start()
    deleting.join(0.2)  # long enough for a deletion that does not wait
    store.may_store.set()
    deleting.join(_PATIENCE_S)
    mine.write(entry(2))
    assert store.values == {}


def changes_in(store: FakeKeyValueStore) -> list[bytes]:
    """Keys of the records of changes, oldest first."""
    return sorted(key for key in store.values if b"/change/" in key)


def written_until(mine: GcsJournal, last: int) -> None:
    for number in range(1, last + 1):
        mine.write(entry(number))


def test_only_what_has_changed_is_written_after_the_first_entry() -> None:
    store = FakeKeyValueStore()
    mine = journal(store)
    mine.begin(1.0)
    written_until(mine, 3)
    whole = store.values[b"j1/1/entry/000001"]
    assert [len(store.values[key]) < len(whole) / 3 for key in changes_in(store)] == [True, True]
    assert journal(store).read() == entry(3)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_supervisor_that_dies_between_a_new_entry_and_the_end_of_the_old_changes_loses_nothing(
    is_killed: bool,
) -> None:
    class Killed(FakeKeyValueStore):
        def delete(self, key: bytes) -> None:
            if not is_killed:
                super().delete(key)

    store = Killed()
    mine = journal(store)
    mine.begin(1.0)
    mine.write(entry(0))
    first = store.values[b"j1/1/entry/000001"]
    number = 0
    while store.values[b"j1/1/entry/000001"] == first:
        number += 1
        mine.write(entry(number))
    assert 1 < number <= 65
    assert journal(store).read() == entry(number)
    mine.write(entry(number))  # equal to the one before: nothing to put, but the records that are void go
    if is_killed:
        assert len(changes_in(store)) == number - 1, "they are still there, and void"
    mine.write(entry(number + 1))
    assert journal(store).read() == entry(number + 1)


def test_a_torn_last_record_is_dropped_and_a_damaged_one_before_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeKeyValueStore()
    mine = journal(store)
    mine.begin(1.0)
    written_until(mine, 5)
    second, last = changes_in(store)[1], changes_in(store)[-1]
    store.values[last] = store.values[last][:-20]
    assert journal(store).read() == entry(4) and not caplog.records
    store.values[second] = b"damaged"
    assert journal(store).read() == entry(2)
    assert [(record.message, vars(record)["lost"]) for record in caplog.records] == [("journal.damaged", 1)]
    assert journal(store).begin(2.0).num_lost == 1


def test_a_reader_that_meets_a_new_entry_reads_again() -> None:
    """A predecessor that still runs may replace its entry, and delete the changes, while its successor reads."""

    class Compacting(FakeKeyValueStore):
        def __init__(self) -> None:
            super().__init__()
            self.newer: dict[bytes, bytes] = {}

        def keys(self, prefix: bytes) -> list[bytes]:
            if b"/change/" in prefix and (newer := dict(self.newer)):
                self.newer.clear()
                self.values = newer
            return super().keys(prefix)

    store, later = Compacting(), FakeKeyValueStore()
    mine, same = journal(store), journal(later)
    mine.begin(1.0)
    written_until(mine, 3)
    same.begin(1.0)
    same.write(entry(4))
    store.newer = dict(later.values)
    assert journal(store).read() == entry(4)


SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 4}}


def config(key: str) -> SupervisorConfig:
    return SupervisorConfig(
        job_id="j",
        attempt=1,
        spec=parse_spec(SPEC),
        checkpoint_root="/c",
        granted=2,
        epoch=3,
        spec_version=1,
        snapshot_key=key,
    )


def test_the_first_configuration_stays_until_the_journal_is_deleted() -> None:
    head = FakeKeyValueStore()
    stored = StoredConfig(head, "j", 1)
    assert stored.read() is None
    assert stored.first(config("one")) == (config("one"), False)
    assert stored.first(config("two")) == (config("one"), False) and stored.read() == config("one")
    GcsJournal(head, "j", 1).delete()
    assert stored.read() is None


def test_the_home_is_that_of_the_control_plane_whatever_is_stored() -> None:
    """Job code can write into the head's store."""
    stored = StoredConfig(FakeKeyValueStore(), "j", 1)
    stored.first(config("one").model_copy(update={"home": Home(url="http://elsewhere", token="forged")}))
    own = config("two").model_copy(update={"home": Home(url="http://here", token="own")})
    merged = config("one").model_copy(update={"home": own.home})
    assert stored.first(own) == (merged, True), "a supervisor with another home is replaced"
    assert stored.first(own) == (merged, False) and stored.read() == merged


def test_a_stored_configuration_is_no_entry_of_the_journal() -> None:
    head = FakeKeyValueStore()
    StoredConfig(head, "j", 1).first(config("one"))
    beginning = GcsJournal(head, "j", 1).begin(now=1.0)
    assert (beginning.life, beginning.entry) == (1, None)


def test_text_that_has_no_utf_8_is_written_with_escapes() -> None:
    store = FakeKeyValueStore()
    mine = journal(store)
    mine.begin(1.0)
    for seq in (1, 2):  # a whole entry, then a change
        event = PendingEvent(at=1.0, type="worker.started", data={"text": "caf\udce9"})
        mine.write(entry(seq).model_copy(update={"unacknowledged": (Unacknowledged(seq=seq, item=event),)}))
    found = journal(store).read()
    assert found is not None and found.seq == 2
    assert found.unacknowledged[0].item.model_dump()["data"] == {"text": "caf\\udce9"}


def test_an_entry_that_cannot_be_made_is_not_waited_for() -> None:
    """The supervisor ends its attempt with this error instead of going on without a journal."""
    mine = journal(FakeKeyValueStore())
    mine.begin(1.0)
    mine.write(entry(1))
    broken = entry(2).model_copy(update={"seq": object()})
    for _ in range(2):
        with pytest.raises(JournalFailed, match="the journal cannot be written"):
            mine.write(broken)
