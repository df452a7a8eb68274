"""The journal: what a supervisor must still know after its own death, and which supervisor of an attempt is the last.

    JOB/ATTEMPT/life/000002      claimed by the second supervisor: created only if absent, so by one process only
    JOB/ATTEMPT/entry/000002     its newest whole entry; only that process writes it
    JOB/ATTEMPT/change/000002/000007   what has changed since: its seventh record of changes (journal_records.py)
    JOB/ATTEMPT/epoch            the highest lease epoch that a supervisor has obeyed

It lies in the cluster's key-value store (GCS), and exists as long as the cluster. Without the cluster there is no
worker to reattach to, and the job resumes from its durable checkpoint in a new attempt. An entry is written before the
commands that follow from it are performed.

A supervisor whose node was cut off is started again on another node and cannot know of it. Its successor claims the
next life and then reads the entry of the last life that has one. What the predecessor writes afterwards is never read,
since each life writes only its own key. `require_current` asks for the next life's key: the fence before every write
that outlives the attempt.

A whole entry replaces the one before when the changes since are as long. It is put before the changes are deleted, and
each change names the entry it belongs to, so a death in between leaves no mixture. A reader that finds that the entry
has been replaced meanwhile reads again.

While the Ray head is away nothing can be written, and training must not stop for that: `write` waits a moment, then
lets the commands go ahead, and the newest entry is written when the head is back. A supervisor that dies during that
time restarts with an older entry (after the head, which restarts it). What its predecessor did in the meantime is taken
back: workers leave the generations that the entry does not contain (`Fleet.adopt`), so one group more than necessary is
formed, from a snapshot or a checkpoint, and events that were not stored are lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from pydantic_core import from_json

from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.attempt.messages import (
    Command,
    Emit,
    End,
    IssuedOrder,
    Order,
    Run,
    ShowIncident,
    SuspectNode,
    unanswered,
)
from shoal_service.core.attempt.state import Attempt
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent, SuspectedNode
from shoal_service.supervisor.config import Directive
from shoal_service.supervisor.journal_records import Records, replayed
from shoal_service.views import CheckpointView, IncidentView
from shoal_workers.contract import WIRE_VERSION, Frozen, Profiled
from shoal_workers.contract.base import FieldError

JOURNAL_NAMESPACE = b"shoal-journal"
_log = logging.getLogger(__name__)
_RETRY_S = 0.2
NO_ORDER = -1
"""The number of a command that is not an order."""
SLICE_S = 0.05
_ANSWER_S = 0.25
_BYTES_PER_S = 20e6
"""Least speed at which a record is sent to the head, in bytes per second."""
_LAST_RECORD_S = 5.0


_MAX_STARTS = 100
_T = TypeVar("_T")


class Unacknowledged(Frozen):
    """An item that the control plane has not acknowledged yet."""

    seq: int
    item: PendingEvent | IncidentView | CheckpointView | SuspectedNode | Profiled


class JournalEntry(Frozen, defer_build=True):  # its schema is large, and the control plane does not use it
    version: int = 1
    """Version of the wire: that of the release that made it; see WIRE_VERSION."""
    life: int = 0
    """Life of the supervisor that wrote it."""
    state: Attempt
    seq: int
    unacknowledged: tuple[Unacknowledged, ...] = ()
    end: AttemptEnd | None = None
    directive: Directive | None = None
    issued: tuple[IssuedOrder, ...] | None = None
    """The orders without an answer, each with its number; None if there are none."""
    num_orders: int = 0
    """Number of orders that were issued in all: the next one gets this number."""


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """What a supervisor finds when it starts."""

    life: int
    """The life of this supervisor, which is greater than that of every one before it."""
    starts: list[float]
    """Wall-clock times at which the last supervisors of the attempt began, oldest first, this one included."""
    entry: JournalEntry | None
    """The newest entry of its predecessors; None if this is the first supervisor, or no predecessor has written one."""
    epoch: int
    """The highest lease epoch that its predecessors have obeyed; 0: unknown."""
    num_lost: int = 0
    """Number of records after the entry that could not be read, because one in the middle is damaged."""


@dataclass(eq=False)
class NewerJournal(
    FieldError,
    text="the journal has wire version {version}, and this release of Shoal reads versions up to "
    f"{WIRE_VERSION}. Install the same release on every node.",
):
    """The journal was written by a newer release: a cluster's nodes have different releases of Shoal."""

    version: int


class JournalFailed(Exception):
    """An entry could not be made: a fault of Shoal. The supervisor ends its attempt with it."""


def parse_entry(raw: bytes | str) -> JournalEntry:
    """Reads an entry of this release or an older one. Raises NewerJournal."""
    version = from_json(raw).get("version", 1)
    if version > WIRE_VERSION:
        raise NewerJournal(version)
    return JournalEntry.model_validate_json(raw)


class KeyValueStore(Protocol):
    """One namespace of the head's key-value store; `cluster.gcs.GcsKeyValueStore`. Every call raises GcsUnavailable."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value; None if there is no such key."""

    def put(self, key: bytes, value: bytes) -> None:
        """Store the value, in place of an earlier one."""

    def add(self, key: bytes, value: bytes) -> bool:
        """Puts only if the key is absent; False: it is there. Atomic."""

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return all keys that begin with the prefix, in no order."""

    def delete(self, key: bytes) -> None:
        """Delete the key, if it exists."""

    def delete_all(self, prefix: bytes) -> None:
        """Delete all keys that begin with the prefix."""


def num_lives(store: KeyValueStore, job_id: str, attempt: int) -> int:
    """How many supervisors of the attempt have recorded their start. Raises GcsUnavailable."""
    return len(store.keys(f"{job_id}/{attempt}/life/".encode()))


def end_replaced_process() -> None:
    """Ends this process, because it has a successor."""
    _log.error("supervisor.replaced")
    os._exit(1)


class GcsJournal:
    """Keeps the journal of one job attempt in the head's tables. The real `protocols.Journal`.

    `write` is called on the executor's loop only.
    """

    def __init__(
        self, store: KeyValueStore, job_id: str, attempt: int, *, on_replaced: Callable[[], None] = end_replaced_process
    ) -> None:
        """`on_replaced` must not return: it ends this process, which has a successor."""
        self._store = store
        self._on_replaced = on_replaced
        self._root = f"{job_id}/{attempt}"
        self.life = 0
        """Number of this incarnation of the supervisor; 0 before `begin`. Read only."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entry: JournalEntry | None = None
        """The newest entry, if it is not written yet; otherwise None."""
        self._records = Records[JournalEntry]()
        self._asked: HeadWait | None = None
        """What the head is asked to put or delete at the moment, and since when; None if it is not asked for
        anything."""
        self._is_behind = False
        self._fault: Exception | None = None
        """The error that has ended the writing thread; None if it has not ended."""
        self._writer: threading.Thread | None = None
        self._is_deleted = False
        self._putting = threading.Lock()
        """Held while a record is sent, so that none arrives after `delete`."""

    def read(self) -> JournalEntry | None:
        return self._read()[0]

    def begin(self, now: float) -> RecoveredState:
        life = max((_parse_number(key) for key in self._list_keys("life")), default=0) + 1
        while not self._claim(life, now):
            life += 1  # another one was faster, or the answer to this very request was lost
        self.life = life
        entry, num_lost = self._read()
        raw_epoch = self._retry_until_reachable(lambda: self._store.get(f"{self._root}/epoch".encode()))
        return RecoveredState(
            life, self._read_starts(), entry, int(raw_epoch) if raw_epoch is not None else 0, num_lost
        )

    def require_current(self) -> None:
        """Ends this process if it has a successor, or if its attempt was removed. The successor would do everything a
        second time that this process did next."""
        mine, next_one = (self._make_key("life", life) for life in (self.life, self.life + 1))
        if (
            self._retry_until_reachable(lambda: self._store.get(mine)) is None
            or self._retry_until_reachable(lambda: self._store.get(next_one)) is not None
        ):
            self._on_replaced()

    def obey(self, epoch: int) -> None:
        """Records a higher epoch, before it is obeyed. While the head is away, nothing can be written, and this
        returns."""
        try:
            self._store.put(f"{self._root}/epoch".encode(), str(epoch).encode())
        except GcsUnavailable as error:
            _log.warning("journal.epoch_not_written", extra={"epoch": epoch, "error": str(error)})

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        """Writes an entry. It takes about a millisecond; while the head is away, a moment the first time and nothing
        afterwards; see `HeadWait`.

        Raises:
            JournalFailed: an entry could not be made; nothing is written any more.
        """
        with self._changed:
            self._refuse_after_fault()
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_until_fault, name="journal", daemon=True)
                self._writer.start()
            self._entry = entry
            self._changed.notify_all()
            if self._is_behind or not wait:
                return
            if not self._is_written():
                self._is_behind = True
                _log.warning("journal.behind", extra={"reason": "the Ray head does not answer"})
            self._refuse_after_fault()

    def _refuse_after_fault(self) -> None:
        if self._fault is not None:
            raise JournalFailed(f"the journal cannot be written: {self._fault!r}") from self._fault

    def _is_written(self) -> bool:
        """Waits until the record is written. False: the head has not answered for a moment. The time to make the
        record, which grows with the number of workers, does not count."""
        wait: HeadWait | None = None
        while self._entry is not None and self._fault is None:
            asked = self._asked
            if asked is None or wait is None or wait.asked_mono != asked.asked_mono:
                wait = asked
            if wait is not None and wait.is_over:
                return False
            began = time.monotonic()
            self._changed.wait(SLICE_S)
            if wait is not None:
                wait = wait.after(began, time.monotonic())
        return True

    def delete(self) -> None:
        """Deletes the journal. Nothing is written afterwards. A record that is being sent is waited for, but not for a
        head that is away."""
        self._is_deleted = True
        is_idle = self._putting.acquire(timeout=_LAST_RECORD_S)
        try:
            self._store.delete_all(f"{self._root}/".encode())
        except GcsUnavailable as error:
            _log.warning("journal.delete_failed", extra={"error": str(error)})
        finally:
            if is_idle:
                self._putting.release()

    def _read(self) -> tuple[JournalEntry | None, int]:
        """Reads the newest entry with its changes, and the number of records that are lost."""
        newest = max(self._list_keys("entry"), default=None)
        while newest is not None and (raw := self._get(newest)) is not None:
            records = [self._get(key) for key in self._list_keys(f"change/{_parse_number(newest):06d}")]
            if raw == self._get(newest):  # else a predecessor that still runs may have deleted some of these records
                replay = replayed(raw, [record for record in records if record is not None])
                if replay.num_lost:
                    _log.error("journal.damaged", extra={"read": replay.num_changes, "lost": replay.num_lost})
                return parse_entry(replay.entry), replay.num_lost
        return None, 0

    def _claim(self, life: int, now: float) -> bool:
        return self._retry_until_reachable(lambda: self._store.add(self._make_key("life", life), repr(now).encode()))

    def _write_until_fault(self) -> None:
        try:
            self._write_forever()
        except Exception as error:
            _log.error("journal.failed", exc_info=error)
            with self._changed:
                self._fault = error
                self._changed.notify_all()

    def _write_forever(self) -> None:
        is_first = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entry is not None)
                entry = self._entry
                was_away = self._is_behind
            assert entry is not None
            self._put(entry, was_away=was_away)
            with self._changed:
                if self._entry is entry:
                    self._entry = None
                    self._is_behind = False
                    self._changed.notify_all()
            self._asked = HeadWait(time.monotonic(), 0)
            self._delete_changes()
            if is_first:
                self._delete_older_entries()
                is_first = False
            self._asked = None

    def _put(self, entry: JournalEntry, *, was_away: bool) -> None:
        """Writes the entry, or what has changed since the last one. A supervisor that was cut off learns here that it
        has a successor."""
        number, record = self._records.next(entry)
        key = self._make_key("entry", self.life)
        if number is not None:
            key = f"{self._root}/change/{self.life:06d}/{number:06d}".encode()
        self._asked = HeadWait(time.monotonic(), len(record))
        while record:
            if was_away:
                self.require_current()
            try:
                with self._putting:
                    if not self._is_deleted:
                        self._store.put(key, record)
                    if self._is_deleted:  # meanwhile, and `delete` has not waited so long
                        self._store.delete(key)
                break
            except GcsUnavailable:
                was_away = True
                time.sleep(_RETRY_S)
        self._asked = None

    def _delete_changes(self) -> None:
        """Deletes the records of changes to earlier entries. They are not read again, because they name the entry that
        they change."""
        with suppress(GcsUnavailable):  # they go with the attempt
            for number in self._records.take_void():
                self._store.delete(f"{self._root}/change/{self.life:06d}/{number:06d}".encode())

    def _delete_older_entries(self) -> None:
        with suppress(GcsUnavailable):  # they go with the attempt
            for key in self._store.keys(f"{self._root}/entry/".encode()):
                if _parse_number(key) < self.life:
                    self._store.delete(key)
                    self._store.delete_all(f"{self._root}/change/{_parse_number(key):06d}/".encode())

    def _read_starts(self) -> list[float]:
        raws = (self._get(key) for key in self._list_keys("life")[-_MAX_STARTS:])
        return [float(raw) for raw in raws if raw is not None]

    def _list_keys(self, what: str) -> list[bytes]:
        return sorted(self._retry_until_reachable(lambda: self._store.keys(f"{self._root}/{what}/".encode())))

    def _get(self, key: bytes) -> bytes | None:
        return self._retry_until_reachable(lambda: self._store.get(key))

    def _make_key(self, what: str, life: int) -> bytes:
        return f"{self._root}/{what}/{life:06d}".encode()

    def _retry_until_reachable(self, call: Callable[[], _T]) -> _T:
        while True:
            try:
                return call()
            except GcsUnavailable:
                time.sleep(_RETRY_S)  # the head does not announce its return


def _parse_number(key: bytes) -> int:
    return int(key.rpartition(b"/")[2])


class UnansweredOrders:
    """The orders of an attempt that have no answer yet, by number; kept in the journal. Used by the executor."""

    def __init__(self, entry: JournalEntry | None) -> None:
        """`entry`: the newest one of the predecessor, which has the orders that it issued and that are not known to be
        answered; None if there is no predecessor."""
        self.by_number: dict[int, Order] = {}
        self._written: dict[int, IssuedOrder] = {}
        """The orders as they are in the journal, by number."""
        self.num_issued = 0
        if entry is not None:
            self.by_number = {issued.id: _restore_source(issued.order, entry.state) for issued in entry.issued or ()}
            self.num_issued = entry.num_orders

    def issue(self, commands: Iterable[Command]) -> list[int]:
        """Gives a number to each order among the commands. Returns the number of each command."""
        numbers = []
        for command in commands:
            if isinstance(command, (Emit, ShowIncident, SuspectNode, End)):
                numbers.append(NO_ORDER)
                continue
            self.by_number[self.num_issued] = command
            numbers.append(self.num_issued)
            self.num_issued += 1
        return numbers

    def drop_answered(self, state: Attempt) -> None:
        if self.by_number:
            self.by_number = unanswered(self.by_number, state)

    def done(self, number: int) -> None:
        """Forgets an order whose answer is not in the state."""
        self.by_number.pop(number, None)

    def issued(self) -> tuple[IssuedOrder, ...]:
        """The orders without an answer, for the journal."""
        self._written = {
            number: self._written.get(number) or IssuedOrder(number, _without_source(order))
            for number, order in self.by_number.items()
        }
        return tuple(self._written.values())


def _without_source(order: Order) -> Order:
    """Leaves out the source, which names a worker for each rank and is the same in all `run` orders of a generation.
    The journal has it once, in the state."""
    if not isinstance(order, Run) or order.assignment.restore_snapshot is None:
        return order
    return replace(order, assignment=order.assignment.model_copy(update={"restore_snapshot": None}))


def _restore_source(order: Order, state: Attempt) -> Order:
    """Puts the source back, so that the command is as it was issued."""
    if not isinstance(order, Run) or order.assignment.generation != state.group.generation:
        return order
    source = order.assignment.restore_snapshot or state.group.source
    return replace(order, assignment=order.assignment.model_copy(update={"restore_snapshot": source}))


@dataclass(frozen=True, slots=True)
class HeadWait:
    """How long a supervisor waits for the head to store a record. Pure.

    The head answers within a millisecond, so one that has not answered for a quarter of a second is away, and the
    commands go ahead without it. Two things look the same and are not the head's: a record of a large group takes time
    to send, and a supervisor that has no CPU sees an answer late. So the wait has slices.
    """

    asked_mono: float
    """Monotonic time since which the head has been asked to store this record or to delete older ones."""
    num_bytes: int
    """Length of the record in bytes."""
    waited_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.waited_s >= _ANSWER_S + self.num_bytes / _BYTES_PER_S

    def after(self, began_mono: float, ended_mono: float) -> HeadWait:
        """Adds one more slice to the wait. At most one slice is counted, however late this process woke from it."""
        waited_s = ended_mono - max(began_mono, self.asked_mono)
        return replace(self, waited_s=self.waited_s + min(SLICE_S, max(0.0, waited_s)))
