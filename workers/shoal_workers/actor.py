"""WorkerActor: the Ray actor around one program. It has two kinds of threads, and makes no decisions.

    training thread  (one)    prepare, run             blocks in user code and collectives
    control threads  (some)   poll, interrupt, join    never touch the model, answer without delay

The program is an `Engine`, which trains a task in this process, or a `ScriptRunner`, which runs a script in processes
of its own.

Only the job's supervisor creates and calls it. It is a detached, named actor: it outlives its supervisor, and a
restarted supervisor finds it again by its name.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from shoal_workers import exit_status, stacks
from shoal_workers.actor_process import exit_with_raylet, on_sigterm, use_named_temporary_directory
from shoal_workers.contract import (
    WIRE_VERSION,
    Assignment,
    ErrorClass,
    ErrorReport,
    ExitKind,
    JobSpec,
    MetricsBatch,
    MetricsProgress,
    ModelShape,
    Phase,
    PreemptionNotice,
    ProfileRequest,
    Progress,
    Refused,
    SavedPart,
    SnapshotPart,
    SnapshotScope,
    SnapshotSource,
    WorkerConfig,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
    WorkerReport,
    WorkerStack,
)
from shoal_workers.contract.messages import Frame
from shoal_workers.engine.process.engine_error import engine_error
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.secrets import Mask, read_secrets
from shoal_workers.engine.process.tee import CapturedOutput
from shoal_workers.engine.process.use_meter import UseMeter
from shoal_workers.forkserver.code_path import CODE, admit_code
from shoal_workers.job_files.directory import JobDirectory, enter
from shoal_workers.job_files.keeper import OutputKeeper
from shoal_workers.logs import SHOAL_LOGGERS, set_up_logs
from shoal_workers.machine_limits import total_bytes
from shoal_workers.metrics_hook.process import HookProcess, job_of
from shoal_workers.ray_internals import raylet_socket
from shoal_workers.stacks import is_worker_process

if TYPE_CHECKING:
    from shoal_workers.engine.engine import Engine
    from shoal_workers.engine.group.store.server import StoreServer
    from shoal_workers.script.runner import ScriptRunner
    from shoal_workers.snapshot_store.store import SnapshotStore

    Program = Engine | ScriptRunner

_GRACE_S = 30.0
"""The time between SIGTERM and SIGKILL that platforms give a process by default (Kubernetes' default)."""
_KEEP_S = 0.5
_KEEP_YIELDED_S = 2.0
"""Seconds that a group which was asked to stop waits for its outputs to be stored."""
CONCURRENCY_GROUPS = {"train": 1, "control": 8, "inspect": 2}


class WorkerActor:
    """One worker. Every call names the life of its supervisor, and the generation that it concerns."""

    def __init__(self, spec: JobSpec, config: WorkerConfig) -> None:
        self._spec = spec
        self._config = config
        self._node_id = ray.get_runtime_context().get_node_id()
        self._node_ip = ray.util.get_node_ip_address()
        self._outbox = Outbox(config.worker_id, on_report=self._note_report)
        self._code_directory = Path.cwd()
        self._directory = JobDirectory(config.job_id, config.checkpoint_root)
        self._outputs = OutputKeeper(self._directory, config.checkpoint_root, spec.outputs, self._outbox.log_text)
        self._file_note, self._num_file_notes = "", 0
        self._has_entered = False
        self._program: Program | None = None
        """What the worker runs: `prepare`, `build_model` and `run` on the training thread, all else on any thread."""
        self._pid_of_script: Callable[[], int] | None = None
        """The process of the worker's script; None if it trains a task."""
        self._snapshot_store: SnapshotStore | None = None
        self._fenced = 0
        self._life = 0
        self._num_refused = 0
        self._life_lock = threading.Lock()
        self._assignment: Assignment | None = None
        self._exits: dict[int, WorkerExit] = {}
        self._exited = threading.Condition()
        self._notices = 0
        has_gpu = spec.worker.gpus > 0
        self._meter = UseMeter(config.checkpoint_root, has_gpu=has_gpu, also=self._sample_links)
        self._meter.start()
        exit_with_raylet()
        use_named_temporary_directory()
        self._crash_file = exit_status.record_crashes(raylet_socket())
        on_sigterm(self._give_notice)
        self._mask = Mask()
        self._metrics_hook = HookProcess(spec.metrics.hook or "", job_of(config.job_id, spec), self._say, self._mask)
        self._output = CapturedOutput(self._outbox, self._mask, exit_status.folder_of(raylet_socket()))
        set_up_logs(config.logs, loggers=SHOAL_LOGGERS, context=self._log_fields)
        if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del os.environ["PYTHONBREAKPOINT"]  # Ray's debugger waits for someone to attach

    @ray.method(concurrency_group="train")
    def prepare(self, life: int) -> WorkerInfo | ErrorReport | Refused:
        """Warm up: imports, task class, data, rendezvous store. Idempotent; returns the errors of the user's code."""
        if refused := self._refused(life):
            return refused
        try:
            self._read_secrets()
            self._open_directory()
            program = self._load_program()
            program.prepare(self._config.expected_bytes)
        except Exception as error:
            report = getattr(error, "report", None)
            return self._masked(report if isinstance(report, ErrorReport) else engine_error(error, Phase.PREPARING))
        finally:
            self._output.flush()
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return WorkerInfo(
            version=WIRE_VERSION,
            worker_id=self._config.worker_id,
            node_id=self._node_id,
            node_ip=self._node_ip,
            pid=os.getpid(),
            store_port=program.store_port,
            device="cuda" if self._spec.worker.gpus else "cpu",
            snapshot_port=self._snapshot_store.port if self._snapshot_store is not None else 0,
            machine_id=self._snapshot_store.memory_id if self._snapshot_store is not None else "",
            rack=ray.get_runtime_context().get_node_labels().get(self._config.rack_label, ""),
            slot=next((int(gpu) for gpu in gpus if gpu.isdecimal()), -1),
            memory_bytes=total_bytes(),
        )

    @ray.method(concurrency_group="train")
    def build_model(self, life: int) -> ModelShape | ErrorReport | Refused:
        """Returns, for an update of the code, the shape of the model that this worker would train, before it does."""
        if refused := self._refused(life):
            return refused
        try:
            self._open_directory()
            return self._load_program().build_model()
        except Exception as error:
            report = getattr(error, "report", None)
            return self._masked(report if isinstance(report, ErrorReport) else engine_error(error, Phase.BUILDING))
        finally:
            self._output.flush()

    @ray.method(concurrency_group="control")
    def model_shape(self, life: int) -> ModelShape | Refused | None:
        """Shape of the model that it trains; None if it has trained none yet."""
        if refused := self._refused(life):
            return refused
        return self._program.model_shape if self._program is not None else None

    @ray.method(concurrency_group="train")
    def run(self, assignment: Assignment, life: int, source: SnapshotSource | None = None) -> WorkerExit | Refused:
        """Train one generation. If the worker dies, this call fails, and the supervisor learns of it.

        A repeated call for a generation that it has left returns the same answer. `life`: of the caller, which may
        repeat an assignment that its predecessor made. `source`: the assignment's `restore_snapshot`, if it is sent to
        all ranks as one object.
        """
        if source is not None:
            assignment = assignment.model_copy(update={"restore_snapshot": source})
        if refused := self._refused(life, assignment):
            return refused
        if exit_cause := self._exits.get(assignment.generation):
            return exit_cause
        if assignment.generation <= self._fenced or assignment is not self._assignment:
            worker_exit = WorkerExit(
                generation=assignment.generation, rank=assignment.rank, kind=ExitKind.STALE, step=0
            )
        else:
            worker_exit = self._run(assignment)
        self._output.flush()
        with self._exited:
            self._exits = {assignment.generation: worker_exit}
            self._exited.notify_all()
        return worker_exit

    @ray.method(concurrency_group="control")
    def adopt(self, life: int, generation: int) -> Refused | None:
        """A restarted supervisor begins: calls of its predecessors are refused from now on. A predecessor may have
        begun generations later than `generation` that it did not write into the journal: the worker leaves them."""
        if refused := self._refused(life):
            return refused
        with self._life_lock:
            current = self._assignment
        if current is not None and current.generation > generation:
            self._interrupt(current.generation)
        return None

    @ray.method(concurrency_group="control")
    def join(self, generation: int, life: int) -> WorkerExit | Refused:
        """The result of `run(generation)`, for a restarted supervisor that lost the original call."""
        if refused := self._refused(life):
            return refused
        with self._exited:
            self._exited.wait_for(lambda: any(g >= generation for g in self._exits))
            exit_cause = self._exits.get(generation)
        return exit_cause or WorkerExit(generation=generation, rank=0, kind=ExitKind.STALE, step=0)

    @ray.method(concurrency_group="control")
    def interrupt(self, generation: int, life: int) -> Refused | None:
        """Fence every generation up to this one, and wake the training thread out of its collective."""
        if refused := self._refused(life):
            return refused
        self._interrupt(generation)
        return None

    def _interrupt(self, generation: int) -> None:
        self._fenced = max(self._fenced, generation)
        if self._program is not None:
            self._program.interrupt(generation)

    @ray.method(concurrency_group="control")
    def request_yield(self, generation: int, durable: bool, life: int) -> Refused | None:
        """Stop after the step that the next vote agrees on, with a durable checkpoint of it or only a snapshot."""
        if refused := self._refused(life):
            return refused
        if self._program is not None:
            self._program.request_yield(generation, durable=durable)
        return None

    @ray.method(concurrency_group="control")
    def note_commit(self, generation: int, step: int, error: str, life: int) -> Refused | None:
        """The checkpoint of the last step is committed, or could not be: the final validation waits for this."""
        if refused := self._refused(life):
            return refused
        if self._program is not None:
            self._program.note_commit(generation, step, error)
        return None

    @ray.method(concurrency_group="control")
    def request_profile(self, generation: int, request: ProfileRequest, life: int) -> Refused | None:
        """Profile some steps of this rank, from its next step boundary; a report follows."""
        if refused := self._refused(life):
            return refused
        if self._program is not None:
            self._program.request_profile(generation, request)
        return None

    @ray.method(concurrency_group="control")
    def forward_metrics(self, batch: MetricsBatch, life: int) -> MetricsProgress | Refused:
        """Pass points on to the metrics hook, which runs in a process beside this worker; how far it is."""
        if refused := self._refused(life):
            return refused
        return self._metrics_hook.forward(batch, life)

    @ray.method(concurrency_group="control")
    def snapshot_parts(self, life: int) -> tuple[SnapshotPart, ...] | Refused:
        """The snapshot parts in the memory of this worker's node."""
        if refused := self._refused(life):
            return refused
        return self._snapshot_store.snapshot_parts() if self._snapshot_store is not None else ()

    @ray.method(concurrency_group="control")
    def forget_snapshots(self, life: int | None = None) -> Refused | None:
        """Remove the attempt's snapshots from this node, once the attempt is over. Without `life`: the control plane
        calls, after the supervisor's end."""
        if life is not None and (refused := self._refused(life)):
            return refused
        if self._snapshot_store is not None:
            self._snapshot_store.registry.remove_attempt()
        return None

    @ray.method(concurrency_group="control")
    def keep_files(self, life: int) -> bool | Refused | None:
        """The attempt ends: store what the program has written on this node. None if it goes on: ask again. False:
        another worker has to do it."""
        if refused := self._refused(life):
            return refused
        return self._outputs.finish(_KEEP_S)

    @ray.method(concurrency_group="control")
    def retire(self, within_s: float, life: int) -> Refused | None:
        """Exit after `within_s` seconds if the worker has not been killed by then: the attempt does not use it any
        more."""
        if refused := self._refused(life):
            return refused
        timer = threading.Timer(within_s, self._exit_unless_replaced, args=(life,))
        timer.daemon = True
        timer.start()
        return None

    @ray.method(concurrency_group="control")
    def terminate(self, pid: int, life: int) -> bool | Refused:
        """SIGKILL a worker of this node that Ray cannot end because it is stopped. False: it is gone already.

        A pid that was reused by another process is not killed.
        """
        if refused := self._refused(life):
            return refused
        if not is_worker_process(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    @ray.method(concurrency_group="control")
    def exit_words(self, pid: int) -> str:
        """How another worker of this node ended; empty: not known."""
        exit_state = exit_status.read(raylet_socket(), pid)
        return exit_state.words() if exit_state is not None else ""

    @ray.method(concurrency_group="inspect")
    def stack(self, life: int) -> WorkerStack | Refused:
        """What the training thread does now."""
        if refused := self._refused(life):
            return refused
        if self._pid_of_script is not None:
            return stacks.of_script(self._config.worker_id, self._progress(), self._pid_of_script())
        signs = self._program.signs() if self._program is not None else (None, ())
        return stacks.of_this_worker(self._config.worker_id, self._progress(), signs)

    @ray.method(concurrency_group="inspect")
    def stack_of(self, pid: int, native: bool) -> tuple[Frame, ...] | str:
        """What another worker of this node does, by py-spy; a text says why that is not known."""
        return stacks.of_worker(pid, native=native)

    @ray.method(concurrency_group="control")
    def poll(self, after: int, acknowledged: int, wait_s: float, life: int) -> WorkerPoll | Refused:
        """All reports and log lines since sequence number `after`; waits up to `wait_s` seconds for the first one.

        Unacknowledged reports are kept: a restarted supervisor polls for them again.
        """
        if refused := self._refused(life):
            return refused
        poll = self._outbox.poll(after, wait_s, self._progress, acknowledged=acknowledged)
        return poll.model_copy(update={"num_refused": self._num_refused, "use": self._meter.latest})

    def _refused(self, life: int, assignment: Assignment | None = None) -> Refused | None:
        """Returns None if the caller is the newest supervisor so far. Its `assignment` then becomes the current one,
        unless it is older than that."""
        with self._life_lock:
            if life < self._life:
                self._num_refused += 1
                return Refused(life=self._life)
            self._life = life
            last = self._assignment.generation if self._assignment is not None else 0
            if assignment is not None and assignment.generation > last:
                self._assignment = assignment
            return None

    def _exit_unless_replaced(self, life: int) -> None:
        """A successor of the supervisor that retired this worker may have adopted it since."""
        if life == self._life:
            self._output.flush()
            os._exit(0)

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
        try:
            self._begin_with_files(assignment)
            worker_exit = self._load_program().run(assignment)
            if worker_exit.kind is ExitKind.YIELDED and not assignment.local_rank:
                self._outputs.finish(_KEEP_YIELDED_S)  # this node may be left
            else:
                self._outputs.collect_soon()
            if worker_exit.error is None:
                return worker_exit
            return worker_exit.model_copy(update={"error": self._masked(worker_exit.error)})
        except Exception as error:
            report = engine_error(error, self._progress().phase)
            return WorkerExit(
                generation=assignment.generation,
                rank=assignment.rank,
                kind=ExitKind.ENGINE_ERROR if report.error_class is ErrorClass.PLAIN else ExitKind.WORKER_FAULT,
                step=self._progress().step,
                error=report,
            )

    def _open_directory(self) -> None:
        """Leave the directory that Ray has unpacked the code into for that of the job, before anything is imported."""
        archive = self._spec.code.archive
        try:
            self._directory.open(self._code_directory if archive else None, archive or "", self._note_files)
            self._outputs.prepare(self._config.attempt, self._note_files)
            if not self._has_entered:  # once, since a program may go elsewhere
                enter(self._directory.path, self._code_directory, ("PYTHONPATH", CODE))
                self._has_entered = True
                self._admit_code()
        finally:
            self._file_note = ""

    def _admit_code(self) -> None:
        if self._spec.script is None and (hidden := admit_code()):
            self._outbox.log_text(
                f"{', '.join(hidden)} of the job's code cannot be imported: Python, Ray or Shoal have modules of that "
                "name. Rename it"
            )

    def _begin_with_files(self, assignment: Assignment) -> None:
        if not self._directory.is_as_opened:
            self._open_directory()  # a worker with other code may have prepared, for an update that was refused
        try:
            self._outputs.begin(assignment, self._note_files)
        finally:
            self._file_note = ""
        if not assignment.rank and not assignment.is_recovery:
            self._outbox.log_text(
                f"Relative files go to {self._directory.path} on each node. Those that outputs.keep names are kept in "
                f"the job's storage until the job is deleted: shoal files {self._config.job_id}"
            )

    def _note_files(self, text: str) -> None:
        self._file_note = text
        self._num_file_notes += 1

    def _note_report(self, report: WorkerReport) -> None:
        if isinstance(report, SavedPart):
            self._outputs.collect_soon()

    def _sample_links(self) -> None:
        if self._program is not None:
            self._program.sample_links()

    def _read_secrets(self) -> None:
        """Called before the task is imported, which may read them. Idempotent."""
        secrets = read_secrets(self._spec.secrets, os.environ)
        self._mask.add(secrets)
        os.environ.update(secrets)

    def _masked(self, report: ErrorReport) -> ErrorReport:
        masked = {"message": self._mask(report.message), "traceback": self._mask(report.traceback)}
        return report.model_copy(update=masked)

    def _say(self, line: str) -> None:
        self._outbox.log_text(f"[metrics hook] {line}")

    def _log_fields(self) -> dict[str, object]:
        """Fields of every log event of this process; generation and rank are those of the last `run`."""
        fields: dict[str, object] = {"job": self._config.job_id, "attempt": self._config.attempt}
        if self._assignment is not None:
            fields.update(generation=self._assignment.generation, rank=self._assignment.rank)
        return {**fields, "worker": self._config.worker_id}

    def _progress(self) -> Progress:
        if self._program is not None and not self._file_note:
            return self._program.progress
        note, counter = self._file_note or "importing torch", self._num_file_notes
        if self._program is None:
            return Progress(generation=0, phase=Phase.PREPARING, step=0, at=time.time(), note=note, counter=counter)
        progress = self._program.progress
        return progress.model_copy(update={"note": note, "counter": progress.counter + counter})

    def _load_program(self) -> Program:
        """Runs on the training thread: importing torch takes seconds, during which the control threads answer."""
        if self._program is None:
            from shoal_workers.engine.group.store.server import StoreServer

            store = StoreServer(self._node_ip, self._config.snapshot_key)
            self._program = self._engine(store) if self._spec.script is None else self._script_runner(store)
            if self._fenced:
                self._program.interrupt(self._fenced)
        return self._program

    def _engine(self, store: StoreServer) -> Program:
        import torch  # here, not at the top: the supervisor imports this module, and does not need torch

        from shoal_workers.engine.engine import Engine

        torch.set_num_threads(max(1, int(self._spec.worker.cpus)))
        if self._spec.snapshot.enabled:
            self._snapshot_store = self._open_snapshot_store()
        if (store_of_snapshots := self._snapshot_store) is not None:
            self._meter.mapped_bytes = lambda: store_of_snapshots.peer_maps.num_bytes
        engine = Engine(
            self._spec,
            checkpoint_root=self._config.checkpoint_root,
            outbox=self._outbox,
            store=store,
            snapshot_store=self._snapshot_store,
            node_directory=self._snapshot_store.registry.node if self._snapshot_store is not None else None,
        )
        self._meter.part_seconds = engine.part_seconds
        return engine

    def _script_runner(self, store: StoreServer) -> Program:
        from shoal_workers.script.runner import ScriptRunner

        runner = ScriptRunner(
            self._spec,
            checkpoint_root=self._config.checkpoint_root,
            outbox=self._outbox,
            store=store,
            node_id=self._node_id,
            ray_address=ray.get_runtime_context().gcs_address,
        )
        self._pid_of_script = lambda: runner.pid_of_script
        self._meter.processes = runner.processes
        return runner

    def _open_snapshot_store(self) -> SnapshotStore | None:
        """Returns None if the node has no shared memory for snapshots; the log then says what follows."""
        from shoal_workers.snapshot_store.slots.registry import machine_id
        from shoal_workers.snapshot_store.store import SnapshotStore

        shares_node = self._config.snapshot_scope is SnapshotScope.NODE
        try:
            return SnapshotStore(
                job_id=self._config.job_id,
                attempt=self._config.attempt,
                worker_id=self._config.worker_id,
                node_id=self._node_id,
                key=self._config.snapshot_key,
                host=self._node_ip,
                memory_id=self._node_id if shares_node else machine_id(),
            )
        except OSError as error:
            lost = "An unexpected death will cost the steps since the last checkpoint."
            self._outbox.log_text(f"no snapshots in memory: {error}. {lost}")
            return None
