"""Transactions on SQLite and PostgreSQL. Only this file distinguishes the two databases; `Store` calls it.

`Transaction` is what every other module of the store takes as its first parameter: it runs statements, and collects
what has to be published once they are committed. No transaction is repeated after an error, so a caller may open it by
`with`: SQLite's writers wait for each other before they begin, PostgreSQL's statements wait for the rows they lock.

Reads and writes begin differently, because SQLite has one writer: a write begins with BEGIN IMMEDIATE (it waits for the
lock before it reads, so the values that it has read are still current when it writes), and the threads of one process
wait in a queue before the database. SQLite's own busy handler is unfair: it polls, and a thread can starve.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, overload

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    CursorResult,
    Double,
    Engine,
    Executable,
    Row,
    Table,
    cast,
    create_engine,
    event,
    func,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as SqlTimeoutError
from sqlalchemy.sql.selectable import TypedReturnsRows

from shoal_service.core.quantities import duration_text
from shoal_service.store.errors import StoreError, StoreUnavailable
from shoal_service.store.hub import Hub
from shoal_service.store.tables import events
from shoal_service.telemetry.catalogue import DATABASE_SECONDS
from shoal_service.telemetry.metric import Exemplar
from shoal_service.telemetry.tallies import Count, Durations
from shoal_workers.contract import IncidentCause

_Ts = TypeVarTuple("_Ts")
_Kind = TypeVar("_Kind", bound=StrEnum)
_Parameters: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
_WRITES = "shoal_writes"
_BUSY_S = 30
_POOL = 8
_POOL_OVERFLOW = 56  # an HTTP server runs up to 40 requests at once


class DatabaseTallies:
    """What this process's transactions have taken and written."""

    def __init__(self) -> None:
        self.seconds = Durations(DATABASE_SECONDS)
        self.errors = Count()
        self.events = Count()
        self._counts: Counter[tuple[type[StrEnum], StrEnum]] = Counter()
        self._exemplars: dict[IncidentCause, Exemplar] = {}
        self._lock = threading.Lock()

    def counted(self, kind: type[_Kind]) -> dict[_Kind, int]:
        """How often each member of `kind` was counted (`Transaction.count`) since this process started."""
        with self._lock:
            return {kind(key): number for (of, key), number in self._counts.items() if of is kind}

    def exemplars(self) -> dict[IncidentCause, Exemplar]:
        """The newest closed incident of each cause that this process has stored."""
        with self._lock:
            return dict(self._exemplars)

    def add(self, counted: Iterable[StrEnum], exemplars: Mapping[IncidentCause, Exemplar]) -> None:
        with self._lock:
            self._counts.update((type(table), table) for table in counted)
            self._exemplars.update(exemplars)


class Transaction:
    """An open transaction: statements, and what is published and counted once it is committed. Used by one thread."""

    __slots__ = ("_counted", "_epoch", "_exemplars", "_published", "_topics", "connection", "unwritten")

    def __init__(self, connection: Connection, epoch: int | None = None, *, unwritten: str = "") -> None:
        """`unwritten`: why this process can write nothing now, and since when; empty if it can."""
        self.connection = connection
        self.unwritten = unwritten
        self._epoch = epoch
        self._published: dict[str, bool] = {}
        self._topics: dict[str, None] = {}
        self._counted: list[StrEnum] = []
        self._exemplars: dict[IncidentCause, Exemplar] = {}

    @overload
    def execute(self, statement: TypedReturnsRows[*_Ts], parameters: _Parameters = None) -> CursorResult[*_Ts]: ...
    @overload
    def execute(self, statement: Executable, parameters: _Parameters = None) -> CursorResult[*tuple[Any, ...]]: ...
    def execute(self, statement: Executable, parameters: _Parameters = None) -> CursorResult[*tuple[Any, ...]]:
        return self.connection.execute(statement, parameters)

    def require_row(
        self, statement: TypedReturnsRows[*_Ts], missing: StoreError, parameters: _Parameters = None
    ) -> Row[*_Ts]:
        """Execute a statement that returns one row at most. Raises `missing` if it returns none."""
        row = self.execute(statement, parameters).one_or_none()
        if row is None:
            raise missing
        return row

    @property
    def epoch(self) -> int:
        """Epoch of the lease that the transaction holds."""
        assert self._epoch is not None, "only the control loop writes this, with `store.write(epoch)`"
        return self._epoch

    def publish(self, job_id: str, *, is_request: bool = False) -> None:
        """Notifies the subscribers of this process after the commit; see `Hub.publish`."""
        self._published[job_id] = self._published.get(job_id, False) or is_request

    def announce(self, topic: str) -> None:
        """Notifies the subscribers of exactly this topic after the commit; see `Hub.announce`."""
        self._topics[topic] = None

    def count(self, *kinds: StrEnum) -> None:
        """Counts for `DatabaseTallies.counted`, after the commit."""
        self._counted += kinds

    def show(self, exemplars: Mapping[IncidentCause, Exemplar]) -> None:
        """Keeps an exemplar for `DatabaseTallies.exemplars`, after the commit."""
        self._exemplars.update(exemplars)

    def publish_all(self, hub: Hub, tallies: DatabaseTallies) -> None:
        """Publish and count what was collected. `Store.write` calls it after the commit."""
        if self._counted or self._exemplars:
            tallies.add(self._counted, self._exemplars)
        for job_id, is_request in self._published.items():
            hub.publish(job_id, is_request=is_request)
        for topic in self._topics:
            hub.announce(topic)


class Database:
    """An SQLAlchemy engine with the two ways to begin a transaction. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Takes the database at this URL. Raises StoreUnavailable: the URL names no database that Shoal can use."""
        self.url = _usable(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(self.url) if self.is_sqlite else _postgres_engine(self.url)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        self.tallies = DatabaseTallies()
        self._failing: tuple[float, str] | None = None
        """Monotonic time and message of the first write that failed since the last one that did not."""
        event.listen(self._engine, "after_cursor_execute", self._executed)
        self._announced: Connection | None = None
        self._announcing = threading.Lock()
        self._queue: AbstractContextManager[Any] = threading.Lock() if self.is_sqlite else nullcontext()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Begins a transaction that reads: a consistent view on SQLite; on PostgreSQL each statement sees what was
        committed when it began."""
        with self._timed("read"), self._engine.connect() as connection:
            yield Transaction(connection, unwritten=self._unwritten())

    @contextmanager
    def write(self, epoch: int | None = None) -> Iterator[Transaction]:
        """Begins one transaction, which is committed at the end of the block, or rolled back if it raises. `epoch`: for
        `Transaction.epoch`; `Store.write` checks it, and publishes."""
        try:
            with self._timed("write"), self._queue, self._writing.begin() as connection:
                yield Transaction(connection, epoch)
        except StoreUnavailable as error:
            self._failing = self._failing or (time.monotonic(), str(error))
            raise
        self._failing = None

    def announce(self, name: str) -> bool:
        """Lets other processes see that this one lives, by a lock that PostgreSQL keeps as long as the connection does.
        Repeat it: the connection may have broken. False: the database cannot do that (SQLite), or does not now."""
        if self.is_sqlite:
            return False
        with self._announcing:
            try:
                if self._announced is None:
                    self._announced = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                    return bool(self._announced.execute(_TRY_LOCK, {"key": _key_of(name)}).scalar_one())
                return bool(self._announced.execute(_HOLDS_LOCK, _parts_of(name)).scalar_one())
            except (OperationalError, InterfaceError, SqlTimeoutError):
                self._withdraw()
                return False

    def is_announced(self, name: str) -> bool:
        """Return whether a process of that name lives; always True on SQLite, which cannot know."""
        if self.is_sqlite:
            return True
        with self.read() as tx:
            return bool(tx.execute(_IS_LOCKED, _parts_of(name)).scalar_one())

    def withdraw(self) -> None:
        """Undoes `announce`."""
        with self._announcing:
            self._withdraw()

    def close(self) -> None:
        self.withdraw()
        self._engine.dispose()

    def _withdraw(self) -> None:
        if self._announced is not None:
            self._announced.invalidate()  # not back into the pool: the lock is the connection's
            self._announced.close()
            self._announced = None

    def _unwritten(self) -> str:
        if (failing := self._failing) is None:
            return ""
        since_mono, message = failing
        return f"Nothing has been stored for {duration_text(time.monotonic() - since_mono)}: {message.rstrip('.')}."

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start_mono = time.monotonic()
        try:
            with _reachable():
                yield
        except StoreUnavailable:
            self.tallies.errors.add()
            raise
        finally:
            self.tallies.seconds.observe(time.monotonic() - start_mono, kind)

    def _executed(
        self, _connection: Any, _cursor: Any, _statement: Any, parameters: Any, context: Any, many: bool
    ) -> None:
        """Called by SQLAlchemy after each statement: counts the rows that go into the table of events."""
        if context.isinsert and getattr(context.compiled.statement, "table", None) is events:
            self.tallies.events.add(amount=len(parameters) if many else 1)


@contextmanager
def _reachable() -> Iterator[None]:
    """Turns failures outside of the program (no server, full disk, a lock held too long) into StoreUnavailable."""
    try:
        yield
    except (OperationalError, InterfaceError, SqlTimeoutError) as error:
        reason = error.orig if isinstance(error, OperationalError | InterfaceError) else error
        raise StoreUnavailable(f"The database does not answer: {reason}") from error


_LOCKED = (
    "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND classid = CAST(CAST(:high AS bigint) AS oid) AND objid = CAST(CAST(:low AS bigint) AS oid) "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()){more})"
)
_IS_LOCKED = text(_LOCKED.format(more=""))
_HOLDS_LOCK = text(_LOCKED.format(more=" AND pid = pg_backend_pid()"))
_TRY_LOCK = text("SELECT pg_try_advisory_lock(:key)")


def _key_of(name: str) -> int:
    """The name as a signed number of 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


def _parts_of(name: str) -> dict[str, int]:
    """The two halves of the key, as PostgreSQL shows them."""
    high, low = divmod(_key_of(name) % (1 << 64), 1 << 32)
    return {"high": high, "low": low}


def insert_on_conflict(tx: Transaction, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT with ON CONFLICT, which has the same syntax on both databases."""
    return _insert(tx.connection.dialect.name, table)


def json_text(tx: Transaction, document: Column[str], *path: str) -> ColumnElement[Any]:
    """Selects the text at this path of a JSON document in a column; NULL: there is none."""
    if tx.connection.dialect.name == "sqlite":
        return func.json_extract(document, "$." + ".".join(path))
    return func.json_extract_path_text(cast(document, JSON), *path)


def json_number(tx: Transaction, document: Column[str], *path: str) -> ColumnElement[Any]:
    """Selects the number at this path of a JSON document in a column; NULL: there is none."""
    number = json_text(tx, document, *path)
    return number if tx.connection.dialect.name == "sqlite" else cast(number, Double)


def upsert(tx: Transaction, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Inserts rows, or replaces those with the same primary key. All rows have the same columns."""
    if rows:
        tx.execute(_upsert(tx.connection.dialect.name, table, tuple(rows[0])), rows)


@cache
def _insert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


@cache
def _upsert(dialect: str, table: Table, columns: tuple[str, ...]) -> sqlite.Insert | postgresql.Insert:
    """The statement of `upsert`. Cached, because to build a statement takes longer than to run it."""
    statement = _insert(dialect, table)
    key = [column.name for column in table.primary_key]
    values = {name: statement.excluded[name] for name in columns if name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=values)


def _usable(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreUnavailable(
            "database_url is not a database URL. Use sqlite:////absolute/path/shoal.db or "
            "postgresql+psycopg://user@host/database."
        ) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise StoreUnavailable(f"database_url {url!r} names no file; use sqlite:////absolute/path/shoal.db.")
        return parsed.set(drivername="sqlite+pysqlite")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise StoreUnavailable(f"database_url names {backend!r}, but Shoal supports sqlite and postgresql only.")


def _sqlite_engine(url: URL) -> Engine:
    assert url.database is not None
    try:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        _make_private(Path(url.database))
    except OSError as error:
        raise StoreUnavailable(f"database_url {url.database!r}: its directory cannot be created: {error}.") from error
    engine = create_engine(
        url,
        pool_size=_POOL + _POOL_OVERFLOW,  # to open one takes longer than most transactions; idle ones cost little
        max_overflow=0,
        pool_use_lifo=True,
        connect_args={"timeout": _BUSY_S, "check_same_thread": False, "cached_statements": 256},
    )

    @event.listens_for(engine, "connect")
    def _connected(dbapi: Any, _record: Any) -> None:
        dbapi.isolation_level = None  # pysqlite must not begin transactions itself; see _began
        cursor = dbapi.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_S * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _began(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _make_private(path: Path) -> None:
    """Makes the file readable and writable for the owner only, and the files that SQLite makes beside it. An existing
    file is not opened: closing it would release the locks of this process's connections."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for file in (path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))):
        with suppress(FileNotFoundError, PermissionError):  # the second: it is of another user, who lets this one write
            file.chmod(0o600)


def _postgres_engine(url: URL) -> Engine:
    try:
        return create_engine(url, pool_size=_POOL, max_overflow=_POOL_OVERFLOW, pool_pre_ping=True)
    except (ModuleNotFoundError, ImportError, NoSuchModuleError) as error:
        raise StoreUnavailable(
            "database_url names PostgreSQL, but its driver is not installed: pip install 'shoal[postgres]'."
        ) from error
