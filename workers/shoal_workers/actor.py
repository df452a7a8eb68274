"""WorkerActor: the Ray actor around one Engine. It has two kinds of threads, and makes no decisions.

    training thread  (one)    prepare, run             blocks in user code and collectives
    control threads  (some)   poll, interrupt, join    never touch the model, answer without delay

Only the job's supervisor creates and calls it. It is a detached, named actor: it outlives its supervisor, and a
restarted supervisor finds it again by its name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import ray
from shoal_workers.contract.messages import (
    Assignment,
    ErrorReport,
    ExitKind,
    LogLine,
    LogStream,
    Phase,
    Progress,
    WorkerConfig,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
)
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import PreemptionNotice
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.logs import SHOAL_LOGGERS, set_up_logs
from shoal_workers.raylet import exit_with_raylet

if TYPE_CHECKING:
    from shoal_workers.engine.engine import Engine
    from shoal_workers.snapshot_store.store import SnapshotStore

_GRACE_S = 30.0
"""The time between SIGTERM and SIGKILL that platforms give a process by default (Kubernetes' default)."""
CONCURRENCY_GROUPS = {"train": 1, "control": 8}


class WorkerActor:
    """One worker. Every call that concerns a generation names it."""

    def __init__(self, spec: JobSpec, config: WorkerConfig) -> None:
        self._spec = spec
        self._config = config
        self._node_id = ray.get_runtime_context().get_node_id()
        self._node_ip = ray.util.get_node_ip_address()
        self._outbox = Outbox(config.worker_id)
        self._engine: Engine | None = None
        self._snapshot_store: SnapshotStore | None = None
        self._fenced = 0
        self._assignment: Assignment | None = None
        self._exits: dict[int, WorkerExit] = {}
        self._exited = threading.Condition()
        self._notices = 0
        exit_with_raylet()
        signal.signal(signal.SIGTERM, lambda *_: self._give_notice())
        sys.stdout = _Tee(sys.stdout, LogStream.STDOUT, self._outbox)
        sys.stderr = _Tee(sys.stderr, LogStream.STDERR, self._outbox)
        set_up_logs(config.logs, loggers=SHOAL_LOGGERS, context=self._log_fields)

    @ray.method(concurrency_group="train")
    def prepare(self) -> WorkerInfo | ErrorReport:
        """Warm up: imports, task class, data, rendezvous store. Idempotent; returns the errors of the user's code."""
        try:
            engine = self._load_engine()
            engine.prepare(self._config.expected_bytes)
        except Exception as error:
            report = getattr(error, "report", None)
            if isinstance(report, ErrorReport):
                return report
            return ErrorReport(
                type=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                phase=Phase.PREPARING,
            )
        return WorkerInfo(
            worker_id=self._config.worker_id,
            node_id=self._node_id,
            node_ip=self._node_ip,
            pid=os.getpid(),
            store_port=engine.store_port,
            device="cuda" if self._spec.worker.gpus else "cpu",
            snapshot_port=self._snapshot_store.port if self._snapshot_store is not None else 0,
        )

    @ray.method(concurrency_group="train")
    def run(self, assignment: Assignment) -> WorkerExit:
        """Train one generation. If the worker dies, this call fails, and the supervisor learns of it."""
        if assignment.generation <= self._fenced:
            worker_exit = WorkerExit(
                generation=assignment.generation, rank=assignment.rank, kind=ExitKind.STALE, step=0
            )
        else:
            worker_exit = self._run(assignment)
        with self._exited:
            self._exits = {assignment.generation: worker_exit}
            self._exited.notify_all()
        return worker_exit

    @ray.method(concurrency_group="control")
    def join(self, generation: int) -> WorkerExit:
        """The result of `run(generation)`, for a restarted supervisor that lost the original call."""
        with self._exited:
            self._exited.wait_for(lambda: any(g >= generation for g in self._exits))
            found = self._exits.get(generation)
        return found or WorkerExit(generation=generation, rank=0, kind=ExitKind.STALE, step=0)

    @ray.method(concurrency_group="control")
    def interrupt(self, generation: int) -> None:
        """Fence every generation up to this one, and wake the training thread out of its collective."""
        self._fenced = max(self._fenced, generation)
        if self._engine is not None:
            self._engine.interrupt(generation)

    @ray.method(concurrency_group="control")
    def request_yield(self, generation: int, durable: bool) -> None:
        """Stop after the step that the next vote agrees on, with a durable checkpoint of it or only a snapshot."""
        if self._engine is not None:
            self._engine.request_yield(generation, durable=durable)

    @ray.method(concurrency_group="control")
    def snapshot_parts(self) -> tuple[SnapshotPart, ...]:
        """The snapshot parts in the memory of this worker's node."""
        return self._snapshot_store.snapshot_parts() if self._snapshot_store is not None else ()

    @ray.method(concurrency_group="control")
    def forget_snapshots(self) -> None:
        """Remove the attempt's snapshots from this node, once the attempt is over."""
        if self._snapshot_store is not None:
            self._snapshot_store.remove_attempt()

    @ray.method(concurrency_group="control")
    def retire(self, within_s: float) -> None:
        """Exit after `within_s` seconds if the worker has not been killed by then: the attempt does not use it any
        more."""
        timer = threading.Timer(within_s, os._exit, args=(0,))
        timer.daemon = True
        timer.start()

    @ray.method(concurrency_group="control")
    def terminate(self, pid: int) -> bool:
        """SIGKILL a worker of this node that Ray cannot end because it is stopped. False: it is gone already.

        Ray titles an actor's process by its class, so a pid that was reused by another process is not killed.
        """
        if not is_worker_process(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    @ray.method(concurrency_group="control")
    def poll(self, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        """All reports and log lines since sequence number `after`; waits up to `wait_s` seconds for the first one.

        Unacknowledged reports are kept: a restarted supervisor polls for them again.
        """
        return self._outbox.poll(after, wait_s, self._progress, acknowledged=acknowledged)

    def _give_notice(self) -> None:
        """On SIGTERM: report it, and train on until the group continues without this worker. A second SIGTERM ends
        it."""
        self._notices += 1
        if self._notices > 1:
            os._exit(128 + signal.SIGTERM)
        notice = PreemptionNotice(
            generation=self._progress().generation, at=time.time(), grace_s=_GRACE_S, reason="SIGTERM"
        )
        # not on this thread, because it may be the one that holds the outbox's lock
        threading.Thread(target=self._outbox.report, args=(notice,), name="shoal-notice", daemon=True).start()

    def _run(self, assignment: Assignment) -> WorkerExit:
        """The only catch-all of the worker: a bug of the engine becomes an exit with its traceback."""
        self._assignment = assignment
        try:
            return self._load_engine().run(assignment)
        except Exception as error:
            report = ErrorReport(
                type=type(error).__name__,
                message=f"the engine failed: {error}",
                traceback=traceback.format_exc(),
                phase=self._progress().phase,
            )
            return WorkerExit(
                generation=assignment.generation,
                rank=assignment.rank,
                kind=ExitKind.USER_ERROR,
                step=self._progress().step,
                error=report,
            )

    def _log_fields(self) -> dict[str, object]:
        """Fields of every log event of this process; generation and rank are those of the last `run`."""
        fields: dict[str, object] = {"job": self._config.job_id, "attempt": self._config.attempt}
        if self._assignment is not None:
            fields.update(generation=self._assignment.generation, rank=self._assignment.rank)
        return {**fields, "worker": self._config.worker_id}

    def _progress(self) -> Progress:
        if self._engine is not None:
            return self._engine.progress
        return Progress(generation=0, phase=Phase.PREPARING, step=0, at=time.time(), note="importing torch")

    def _load_engine(self) -> Engine:
        """On the training thread: importing torch takes seconds, during which the control threads answer."""
        if self._engine is None:
            import torch  # here, not at the top: the supervisor imports this module, and does not need torch

            from shoal_workers.engine.engine import Engine

            torch.set_num_threads(max(1, int(self._spec.worker.cpus)))
            self._snapshot_store = self._open_snapshot_store()
            self._engine = Engine(
                self._spec,
                checkpoint_root=self._config.checkpoint_root,
                outbox=self._outbox,
                snapshot_store=self._snapshot_store,
            )
            if self._fenced:
                self._engine.interrupt(self._fenced)
        return self._engine

    def _open_snapshot_store(self) -> SnapshotStore | None:
        """None if snapshots are off, or if the node has no shared memory for them; then the log tells the
        consequence."""
        if not self._spec.snapshot.enabled:
            return None
        from shoal_workers.snapshot_store.store import SnapshotStore

        config = self._config
        try:
            return SnapshotStore(
                job_id=config.job_id,
                attempt=config.attempt,
                worker_id=config.worker_id,
                node_id=self._node_id,
                key=config.snapshot_key,
                host=self._node_ip,
            )
        except OSError as error:
            text = (
                f"no snapshots in memory: {error}. An unexpected death will cost the steps since the last checkpoint."
            )
            self._outbox.log_text(text)
            return None


def is_worker_process(pid: int) -> bool:
    """Whether this pid is alive and a worker's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerActor")
    except OSError:
        return False


class _Tee:
    """A text stream that also copies whole lines to the outbox, so that `shoal logs` shows what user code prints."""

    def __init__(self, stream: TextIO, name: LogStream, outbox: Outbox) -> None:
        self._stream = stream
        self._name = name
        self._outbox = outbox
        self._partial = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            if line:
                self._outbox.log(LogLine(at=time.time(), stream=self._name, text=line[:4000]))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
