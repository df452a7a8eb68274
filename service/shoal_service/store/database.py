"""Transactions on SQLite and PostgreSQL. Only this file distinguishes the two databases; `Store` calls it.

`Transaction` is what every other module of the store takes as its first parameter: it runs statements, and collects
what has to be published once they are committed. No transaction is repeated after an error, so a caller may open it by
`with`: SQLite's writers wait for each other before they begin, PostgreSQL's statements wait for the rows they lock.

Reads and writes begin differently, because SQLite has one writer: a write begins with BEGIN IMMEDIATE (it waits for the
lock before it reads, so the values that it has read are still current when it writes), and the threads of one process
wait in a queue before the database. SQLite's own busy handler is unfair: it polls, and a thread can starve.

The tables use only types that SQLite and PostgreSQL share: JSON is text, times are seconds since the epoch. All rows of
a job refer to `jobs.num`, a small integer that also orders the list of jobs (newest first) without ties. Events, logs
and series are keyed by (job_num, number), so that the rows of one job are adjacent. More than half of this file are
these tables: every module of the store takes its transaction and its tables from one place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVarTuple, overload

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    CursorResult,
    Double,
    Engine,
    Executable,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Row,
    String,
    Table,
    Text,
    and_,
    cast,
    create_engine,
    event,
    false,
    func,
    text,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as SqlTimeoutError
from sqlalchemy.sql.selectable import TypedReturnsRows

from shoal_service.core.quantities import duration_text
from shoal_service.store.errors import StoreError, StoreUnavailable
from shoal_service.store.hub import Hub
from shoal_service.telemetry.catalogue import DATABASE_SECONDS, Exemplar
from shoal_service.telemetry.tallies import Count, Durations
from shoal_workers.contract import IncidentCause, JobState

_log = logging.getLogger(__name__)

_Ts = TypeVarTuple("_Ts")
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
        self.counts = Count()
        """What `Transaction.count` has counted, by name and value of the enum."""
        self.exemplars: dict[IncidentCause, Exemplar] = {}
        """The newest closed incident of each cause that this process has stored."""


class Transaction:
    """An open transaction: statements, and what is published and counted once it is committed. Used by one thread."""

    __slots__ = ("_after_commit", "_epoch", "_published", "_topics", "connection", "unwritten")

    def __init__(self, connection: Connection, epoch: int | None = None, *, unwritten: str = "") -> None:
        """`unwritten`: why this process can write nothing now, and since when; empty if it can."""
        self.connection = connection
        self.unwritten = unwritten
        self._epoch = epoch
        self._published: dict[str, bool] = {}
        self._topics: dict[str, None] = {}
        self._after_commit: list[Callable[[DatabaseTallies], object]] = []

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

    def log(self, level: int, event: str, **fields: object) -> None:
        """Logs an event of this process after the commit."""
        self._after_commit.append(lambda _: _log.log(level, event, extra=fields))

    def count(self, *kinds: StrEnum) -> None:
        """Counts for `DatabaseTallies.counts`, after the commit."""
        self._after_commit += [partial(_count, kind) for kind in kinds]

    def keep_exemplars(self, exemplars: Mapping[IncidentCause, Exemplar]) -> None:
        """Keeps an exemplar for `DatabaseTallies.exemplars`, after the commit."""
        self._after_commit.append(lambda tallies: tallies.exemplars.update(exemplars))

    def publish_all(self, hub: Hub, tallies: DatabaseTallies) -> None:
        """Publish, count and log what was collected. `Store.write` calls it after the commit."""
        for job_id, is_request in self._published.items():
            hub.publish(job_id, is_request=is_request)
        for topic in self._topics:
            hub.announce(topic)
        for effect in self._after_commit:
            effect(tallies)


def _count(kind: StrEnum, tallies: DatabaseTallies) -> None:
    tallies.counts.add(type(kind).__name__, kind)


class Database:
    """An SQLAlchemy engine with the two ways to begin a transaction. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        """Takes the database at this URL. Raises StoreUnavailable: the URL names no database that Shoal can use."""
        self.url = _parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(self.url) if self.is_sqlite else _postgres_engine(self.url)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        self.tallies = DatabaseTallies()
        self._failing: tuple[float, str] | None = None
        """Monotonic time and message of the first write that failed since the last one that did not."""
        event.listen(self._engine, "after_cursor_execute", self._count_rows)
        self._presence: Connection | None = None
        self._presence_lock = threading.RLock()
        self._queue: AbstractContextManager[Any] = threading.Lock() if self.is_sqlite else nullcontext()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Begins a transaction that reads: a consistent view on SQLite; on PostgreSQL each statement sees what was
        committed when it began."""
        with self._timed("read"), self._engine.connect() as connection:
            yield Transaction(connection, unwritten=self._describe_unwritten())

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

    def hold_presence(self, name: str) -> bool:
        """Let other processes see that this one lives, by a lock that PostgreSQL keeps as long as the connection does.
        Repeat it: the connection may have broken. Return False if the database cannot do that (SQLite), or not now."""
        if self.is_sqlite:
            return False
        with self._presence_lock:
            try:
                if self._presence is None:
                    self._presence = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
                    return bool(self._presence.execute(_TRY_LOCK, {"key": _make_lock_key(name)}).scalar_one())
                return bool(self._presence.execute(_HOLDS_LOCK, _make_lock_parts(name)).scalar_one())
            except (OperationalError, InterfaceError, SqlTimeoutError):
                self.release_presence()
                return False

    def is_present(self, name: str) -> bool:
        """Return True if a process of that name lives; always on SQLite, which cannot know."""
        if self.is_sqlite:
            return True
        with self.read() as tx:
            return bool(tx.execute(_IS_LOCKED, _make_lock_parts(name)).scalar_one())

    def release_presence(self) -> None:
        """Undo `hold_presence`."""
        with self._presence_lock:
            if self._presence is not None:
                self._presence.invalidate()  # not back into the pool: the lock is the connection's
                self._presence.close()
                self._presence = None

    def close(self) -> None:
        self.release_presence()
        self._engine.dispose()

    def _describe_unwritten(self) -> str:
        if (failing := self._failing) is None:
            return ""
        since_mono, message = failing
        return f"Nothing has been stored for {duration_text(time.monotonic() - since_mono)}: {message.rstrip('.')}."

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Measure a transaction. A failure outside of the program (no server, full disk, a lock held too long) becomes
        StoreUnavailable."""
        start_mono = time.monotonic()
        try:
            yield
        except (OperationalError, InterfaceError, SqlTimeoutError) as error:
            self.tallies.errors.add()
            reason = error.orig if isinstance(error, OperationalError | InterfaceError) else error
            raise StoreUnavailable(f"The database does not answer: {reason}") from error
        finally:
            self.tallies.seconds.observe(time.monotonic() - start_mono, kind)

    def _count_rows(
        self, _connection: Any, _cursor: Any, _statement: Any, parameters: Any, context: Any, many: bool
    ) -> None:
        """Called by SQLAlchemy after each statement: counts the rows that go into the table of events."""
        if context.isinsert and getattr(context.compiled.statement, "table", None) is events:
            self.tallies.events.add(amount=len(parameters) if many else 1)


_LOCKED = (
    "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND classid = CAST(CAST(:high AS bigint) AS oid) AND objid = CAST(CAST(:low AS bigint) AS oid) "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()){more})"
)
_IS_LOCKED = text(_LOCKED.format(more=""))
_HOLDS_LOCK = text(_LOCKED.format(more=" AND pid = pg_backend_pid()"))
_TRY_LOCK = text("SELECT pg_try_advisory_lock(:key)")


def _make_lock_key(name: str) -> int:
    """The name as a signed number of 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


def _make_lock_parts(name: str) -> dict[str, int]:
    """The two halves of the key, as PostgreSQL shows them."""
    high, low = divmod(_make_lock_key(name) % (1 << 64), 1 << 32)
    return {"high": high, "low": low}


def insert_on_conflict(tx: Transaction, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT with ON CONFLICT, which has the same syntax on both databases."""
    return _insert(tx.connection.dialect.name, table)


def in_projects(
    column: Column[str], visible: Collection[str] | None, project: str | None = None
) -> ColumnElement[bool]:
    """Selects the rows of the visible projects, or of one of them; None means all."""
    is_visible = true() if visible is None else column.in_(sorted(visible))
    return is_visible if project is None else and_(is_visible, column == project)


def in_states(states: Iterable[JobState]) -> ColumnElement[bool]:
    """Select the jobs in one of these states."""
    return jobs.c.state.in_(sorted(state.value for state in states))


def json_text(tx: Transaction, document: ColumnElement[Any], *path: str) -> ColumnElement[Any]:
    """Select the text at this path of a JSON document in a column; NULL if there is none."""
    if tx.connection.dialect.name == "sqlite":
        return func.json_extract(document, _sqlite_path(path))
    return func.json_extract_path_text(cast(document, JSON), *path)


def json_type(tx: Transaction, document: ColumnElement[Any], *path: str) -> ColumnElement[Any]:
    """Select the type of the value at this path, as the database names it; NULL if there is none."""
    if tx.connection.dialect.name == "sqlite":
        return func.json_type(document, _sqlite_path(path))
    return func.json_typeof(func.json_extract_path(cast(document, JSON), *path))


def _sqlite_path(path: Sequence[str]) -> str:
    return "$" + "".join(f'."{key}"' for key in path)  # a key has no quote: the language has no way to write one


def json_number(tx: Transaction, document: ColumnElement[Any], *path: str) -> ColumnElement[Any]:
    """Select the number at this path of a JSON document in a column; NULL if there is none."""
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


def _parse_url(url: str) -> URL:
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
    def _set_pragmas(dbapi: Any, _record: Any) -> None:
        dbapi.isolation_level = None  # pysqlite must not begin transactions itself; see _begin
        cursor = dbapi.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_S * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
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


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Serial = BigInteger().with_variant(Integer(), "sqlite")


def _job_num() -> Column[int]:
    return Column("job_num", BigInteger, ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False)


jobs = Table(
    "jobs",
    metadata,
    Column("num", Serial, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("state", String(16), nullable=False),
    Column("desired", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("project", String(63), nullable=False),
    Column("user", String(63), nullable=False),
    Column("spec_version", Integer, nullable=False),
    Column("spec_hash", String(64), nullable=False),  # of the submitted spec, for Idempotency-Key
    Column("idempotency_key_hash", String(64), nullable=True, unique=True),
    Column("attempt", Integer, nullable=False),
    Column("cluster", String(63), nullable=False, server_default=""),  # in which its newest attempt has begun
    Column("granted_workers", Integer, nullable=False),
    Column("pulled_seq", BigInteger, nullable=False),  # last stored report of the current attempt's supervisor
    Column("event_seq", BigInteger, nullable=False),
    Column("log_seq", BigInteger, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("failure_step", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False, index=True),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("sampled_at", Double, nullable=False, server_default="0"),  # the newest of job_samples ...
    Column("sampled_productive", Double, nullable=False, server_default="0"),  # ... and its goodput
    Column("sampled_total", Double, nullable=False, server_default="0"),
    Column("status", Text, nullable=False),  # JobStatus without the fields that have columns
    Column("failure", Text, nullable=True),  # UserFailure: a column of its own, so that lists do not load tracebacks
    Column("workers", Text, nullable=False),  # the newest WorkerViews
    Column("queued_at", Double, nullable=True),  # when it last entered the queue
    Column("step_times", Text, nullable=False, server_default=""),  # telemetry/catalogue.py
    Column("pins", Text, nullable=False, server_default="[]"),  # JSON: names of checkpoints
    Column("profile", Text, nullable=False, server_default=""),  # the open ProfileRequest; empty: there is none
    Column("deleting", Boolean, nullable=False, server_default=false()),  # there is a row of `deletions`
    Column("held", String(160), nullable=True, index=True),  # job/name: a checkpoint of another job that it needs
    Column("archived_at", Double, nullable=True),  # NULL: it is in the lists of jobs
    Column("thinned_until", BigInteger, nullable=False, server_default="0"),  # a step, see store/curves.py
    Index(None, "state", "num"),
    Index(None, "state", "priority", "num"),
    Index(None, "project", "num"),
    Index(None, "state", "project"),
    Index(None, "state", "user"),
    Index(None, "state", "project", "queued_at"),
    Index(None, "ended_at"),
)

job_specs = Table(
    "job_specs",
    metadata,
    _job_num(),
    Column("version", Integer, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "version"),
    sqlite_with_rowid=False,
)

NEWEST_SPEC = and_(job_specs.c.job_num == jobs.c.num, job_specs.c.version == jobs.c.spec_version)
"""Joins `job_specs` to `jobs`."""

events = Table(
    "events",
    metadata,
    _job_num(),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("type", String(64), nullable=False),
    Column("data", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "seq"),
    sqlite_with_rowid=False,
)

incidents = Table(
    "incidents",
    metadata,
    _job_num(),
    Column("attempt", Integer, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("cause", String(32), nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("steps_lost", BigInteger, nullable=True),
    Column("detect_s", Double, nullable=True),
    Column("quiesce_s", Double, nullable=True),
    Column("plan_s", Double, nullable=True),
    Column("form_s", Double, nullable=True),
    Column("restore_s", Double, nullable=True),
    Column("first_step_s", Double, nullable=True),
    Column("recovery_s", Double, nullable=True),
    Column("document", Text, nullable=False),
    Column("bytes_moved", BigInteger, nullable=True),
    PrimaryKeyConstraint("job_num", "attempt", "id"),
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _job_num(),
    Column("step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("committed_at", Double, nullable=True),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "step", "attempt", "generation"),
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    _job_num(),
    Column("step", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("loss", Double, nullable=True),  # NULL: NaN, which SQLite cannot store
    Column("grad_norm", Double, nullable=True),
    Column("lr", Double, nullable=True),  # NULL: a script has not reported it
    Column("tokens_per_s", Double, nullable=True),
    Column("step_s", Double, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("val_loss", Double, nullable=True),
    Column("metrics", Text, nullable=True),  # JSON: the task's own metrics by name; NULL: none
    Column("val_metrics", Text, nullable=True),
    PrimaryKeyConstraint("job_num", "step"),
    sqlite_with_rowid=False,
)

series_rollups = Table(
    "series_rollups",
    metadata,
    _job_num(),
    Column("width", Integer, nullable=False),  # steps per bucket
    Column("bucket", BigInteger, nullable=False),  # (step - 1) // width
    Column("step", BigInteger, nullable=False),  # the last one in the bucket
    Column("at", Double, nullable=False),
    Column("loss", Double, nullable=True),
    Column("grad_norm", Double, nullable=True),
    Column("lr", Double, nullable=True),  # NULL: a script has not reported it
    Column("tokens_per_s", Double, nullable=True),
    Column("step_s", Double, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("val_loss", Double, nullable=True),
    Column("metrics", Text, nullable=True),
    Column("val_metrics", Text, nullable=True),
    PrimaryKeyConstraint("job_num", "width", "bucket"),
    sqlite_with_rowid=False,
)

job_samples = Table(
    "job_samples",
    metadata,
    _job_num(),
    Column("at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("granted", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("seconds", Text, nullable=False),  # JSON: worker-seconds by category of goodput; `recovering` by cause too
    PrimaryKeyConstraint("job_num", "at"),
    sqlite_with_rowid=False,
)

system_samples = Table(  # by rank, see store/system_samples.py
    "system_samples",
    metadata,
    _job_num(),
    Column("width_s", Integer, nullable=False),  # seconds per bucket
    Column("bucket", BigInteger, nullable=False),
    Column("at", Double, nullable=False),  # of the last measurement in the bucket
    Column("generation", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),  # all metrics of all ranks
    PrimaryKeyConstraint("job_num", "width_s", "bucket"),
    sqlite_with_rowid=False,
)

job_labels = Table(
    "job_labels",
    metadata,
    _job_num(),
    Column("key", String(63), nullable=False),
    Column("value", String(255), nullable=False),
    PrimaryKeyConstraint("job_num", "key"),
    Index(None, "key", "value"),
    sqlite_with_rowid=False,
)

fleet_goodput = Table(
    "fleet_goodput",
    metadata,
    Column("bin_at", Double, primary_key=True),  # beginning of ten minutes
    Column("productive", Double, nullable=False),
    Column("total", Double, nullable=False),
)

profiles = Table(
    "profiles",
    metadata,
    _job_num(),
    Column("number", Integer, nullable=False),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "number"),
    sqlite_with_rowid=False,
)

logs = Table(
    "logs",
    metadata,
    _job_num(),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("rank", Integer, nullable=True),
    Column("worker_id", String(128), nullable=False),
    Column("stream", String(16), nullable=False),
    Column("text", Text, nullable=False),
    Column("attempt", Integer, nullable=True),  # null: stored by a release that did not keep it
    PrimaryKeyConstraint("job_num", "seq"),
    sqlite_with_rowid=False,
)

code_archives = Table(
    "code_archives",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("stored_at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

node_drains = Table(
    "node_drains",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("deadline", Double, nullable=True),  # NULL: the node stays, but nothing may run on it
    Column("source", String(16), nullable=False),
)

node_cordons = Table(
    "node_cordons",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("requested_at", Double, nullable=False),
)


node_suspicions = Table(
    "node_suspicions",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("job_id", String(32), nullable=False),  # no foreign key: a probation outlives the job
    Column("attempt", Integer, nullable=False),
    Column("probation_s", Double, nullable=False),
    Column("next_test_at", Double, nullable=False),
    Column("num_tests", Integer, nullable=False),  # failed tests
    Column("job_ids", Text, nullable=False),  # JSON: the jobs that suspect the node
    Column("avoided_until", Double, nullable=False),  # a job's own suspicion lasts until then at least
)

projects = Table(
    "projects",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("parent", String(63), nullable=True),
    Column("weight", Double, nullable=False),
    Column("guaranteed", Integer, nullable=False),
    Column("limit", Integer, nullable=True),
    Column("max_running", Integer, nullable=True),
    Column("max_queued", Integer, nullable=True),
)

users = Table(
    "users",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("max_running", Integer, nullable=True),
    Column("max_queued", Integer, nullable=True),
)

queue_places = Table(
    "queue_places",
    metadata,
    _job_num(),
    Column("position", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("holders", Text, nullable=False),  # JSON: ids of jobs
    Column("expected_at", Double, nullable=True),
    Column("decided_at", Double, nullable=False),
    PrimaryKeyConstraint("job_num"),
)

growth_answers = Table(  # of running jobs; kept for the next attempt
    "growth_answers",
    metadata,
    _job_num(),
    Column("spec_version", Integer, nullable=False),  # the newest one that the scheduler has answered
    Column("workers", Integer, nullable=False),  # granted when it answered
    Column("max_workers", Integer, nullable=False),
    Column("limit", String(32), nullable=False),  # GrowthLimit; empty: nothing holds the job back
    Column("reason", Text, nullable=False),
    Column("decided_at", Double, nullable=False),
    PrimaryKeyConstraint("job_num"),
)

webhooks = Table(  # of the settings; those of a spec are in it
    "webhooks",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("since", Double, nullable=False),  # older events are not delivered
    Column("receiver", Text, nullable=False),
    Column("events", Text, nullable=False),  # JSON: patterns
)

webhook_cursors = Table(
    "webhook_cursors",
    metadata,
    _job_num(),
    Column("hook", String(80), nullable=False),  # service/NAME or job/N
    Column("seq", BigInteger, nullable=False),  # number of the last event that was delivered, left out or given up
    Column("num_failed", Integer, nullable=False),
    Column("failing_since", Double, nullable=True),
    Column("next_at", Double, nullable=True),
    Column("waiting_since", Double, nullable=True),  # time of the event that failed; NULL: none has
    Column("delivered", BigInteger, nullable=False),
    Column("gave_up", BigInteger, nullable=False),
    Column("delivered_at", Double, nullable=True),
    Column("error", Text, nullable=False),  # of the last failed attempt
    PrimaryKeyConstraint("job_num", "hook"),
    Index(None, "hook", "waiting_since"),
    sqlite_with_rowid=False,
)

deletions = Table(  # of jobs; no foreign key: they outlive their jobs
    "deletions",
    metadata,
    Column("job_id", String(32), primary_key=True),
    Column("project", String(63), nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("finished_at", Double, nullable=True),
    Column("document", Text, nullable=False),  # DeletionView
    Index(None, "finished_at"),
)

lease = Table(
    "lease",
    metadata,
    Column("num", Integer, primary_key=True, autoincrement=False),  # always 1: the only row, inserted by the migration
    Column("owner", String(255), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("session_owner", String(255), nullable=False, server_default=""),  # it holds Database.hold_presence
)


tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("role", String(16), nullable=False),
    Column("projects", Text, nullable=True),  # JSON: a list of names; null: all
    Column("user", String(63), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
    Column("last_used_at", Double, nullable=True),
    Column("cluster", String(63), nullable=True),  # of the gateway that shows it; null: it is not one of a gateway
    Column("parent", String(16), nullable=True),  # id of the token that made it and that it ends with
    Column("personal", Boolean, nullable=False, server_default=false()),  # it may make others
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),  # of the cookie, or of the code of a link
    Column("token_id", String(16), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=True),  # null: a JWT's
    Column("principal", Text, nullable=False),  # JSON, of a JWT; else empty
    Column("is_link", Integer, nullable=False),  # 1: a code, which is exchanged once for a session
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "expires_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("num", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("token_id", String(16), nullable=False),
    Column("address", String(64), nullable=False),
    Column("operation", String(200), nullable=False),  # method and route
    Column("path", Text, nullable=False),
    Column("job_id", String(64), nullable=False),
    Column("outcome", String(32), nullable=False),  # done, or the code of the problem
    Index(None, "at"),
    Index(None, "job_id", "num"),
    Index(None, "actor", "num"),
)


clusters = Table(
    "clusters",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("life", String(16), nullable=False),  # of the gateway that speaks for it; empty: none does
    Column("token_id", String(16), nullable=False),  # that this gateway has shown
    Column("report", BigInteger, nullable=False),  # number of its newest report
    Column("reported_at", Double, nullable=False),
    Column("address", Text, nullable=False),
    Column("error", Text, nullable=False),  # why Ray does not answer; empty: it does
    Column("snapshot", Text, nullable=False),  # JSON: ClusterSnapshot; empty: there is none of this life
    Column("snapshot_report", BigInteger, nullable=False),  # number of the report that it came with
    Column("last_order", BigInteger, nullable=False),  # number of the newest order
    Column("ray_cluster", String(64), nullable=False, server_default=""),  # id of the Ray cluster; empty: not known
    Column("labels", Text, nullable=False, server_default="{}"),  # JSON: str -> str, added to those of its nodes
    Column("cordon", Text, nullable=False, server_default=""),  # JSON: Cordon; empty: there is none
)

cluster_orders = Table(
    "cluster_orders",
    metadata,
    Column("cluster", String(63), ForeignKey("clusters.name", ondelete="CASCADE"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("kind", String(63), nullable=False),
    Column("arguments", Text, nullable=False),  # JSON
    Column("archive", String(64), nullable=True),  # SHA-256 of the code archive that the gateway may read for it
    Column("created_at", Double, nullable=False),
    Column("answer", Text, nullable=True),  # JSON: Answer; null: there is none yet
    Column("answered_at", Double, nullable=True),
    PrimaryKeyConstraint("cluster", "number"),
    sqlite_with_rowid=False,
)


def _newest_of_job() -> Column[int]:
    foreign = ForeignKey("jobs.num", ondelete="CASCADE")
    return Column("job_num", BigInteger, foreign, primary_key=True, autoincrement=False)


attempt_tokens = Table(
    "attempt_tokens",
    metadata,
    _newest_of_job(),
    Column("attempt", Integer, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256 of the token, in hexadecimal digits
    Column("life", BigInteger, nullable=False),  # the highest of the supervisors that have reported; 0: none has
    Column("reported_at", Double, nullable=False),  # when the last report was stored; 0: none was
)

directives = Table(
    "directives",
    metadata,
    _newest_of_job(),
    Column("attempt", Integer, nullable=False),
    Column("number", BigInteger, nullable=False),  # rises with each directive of the attempt
    Column("epoch", BigInteger, nullable=False),  # lease epoch of the control plane that wrote it
    Column("body", Text, nullable=False),  # JSON: a Directive
    Column("stacks", Text, nullable=False),  # JSON: the newest StacksAnswer; empty: there is none
)

island_rounds = Table(
    "island_rounds",
    metadata,
    Column("job_num", BigInteger, ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),  # of island 0
    Column("round", Integer, nullable=False),
    Column("contributions", Text, nullable=False),  # JSON: a list of IslandArrival
    Column("decision", Text, nullable=False),  # JSON: a RoundDecision; empty: the round is open
    Column("closed_at", Double),
    PrimaryKeyConstraint("job_num", "round"),
)

job_views = Table(
    "job_views",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("document", Text, nullable=False),  # JSON: a TableView
    Column("saved_at", Double, nullable=False),
    Column("saved_by", String(200), nullable=False),
    PrimaryKeyConstraint("project", "name"),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("version", Integer, nullable=False),
    Column("job_id", String(32), nullable=False, index=True),  # no foreign key: it may outlive the job
    Column("checkpoint", String(100), nullable=False),
    Column("removed", Boolean, nullable=False, server_default=false()),  # its number is never given again
    Column("document", Text, nullable=False),  # JSON: a ModelVersion without its aliases
    PrimaryKeyConstraint("project", "name", "version"),
)

model_aliases = Table(
    "model_aliases",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("version", Integer, nullable=False),
    PrimaryKeyConstraint("project", "name", "alias"),
)
