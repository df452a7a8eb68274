"""ScriptRunner: runs the process of one rank of a script, one generation after the other, in processes of its own.

    training thread   prepare()   run(g1): rendezvous | process ................ | WorkerExit   run(g2) ...
    control threads                        interrupt(g1)  request_yield(g2)  outbox.poll()

It has the surface of `Engine` that the worker's actor uses, and the same two kinds of threads: control threads only set
the fence and wake the training thread. What the script computes is not known here: its process is started when all
ranks have arrived, gets SIGTERM when the group ends, and is killed `script.grace_s` later. The runner does not
import Ray; actor.py calls it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal_workers.contract import (
    REFUSED,
    Assignment,
    Collective,
    ContinueFrom,
    ErrorClass,
    ErrorReport,
    ExitKind,
    GroupFormed,
    JobSpec,
    Launcher,
    ModelShape,
    Phase,
    ProfileRequest,
    Progress,
    ProgressSource,
    WorkerExit,
)
from shoal_workers.contract.media import FOLDER as MEDIA
from shoal_workers.contract.plain_text import text_of
from shoal_workers.contract.suspects import Link
from shoal_workers.engine.generation_ends import Fenced, FormFailed, TaskFailed
from shoal_workers.engine.group.fence import Fence, GenerationFence
from shoal_workers.engine.group.network_interface import find_interface, find_local_address
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.process.position import Position
from shoal_workers.exit_status import MemoryKills
from shoal_workers.script.client import GuardianClient, GuardianLost
from shoal_workers.script.ends import Ended, end_of, killed
from shoal_workers.script.environment import DEVICES, Place, environment_of
from shoal_workers.script.event_files import VARIABLE as EVENTS_VARIABLE
from shoal_workers.script.event_files import EventFiles
from shoal_workers.script.guardian import below
from shoal_workers.script.hook import HookSocket, LoggedSteps, receive
from shoal_workers.script.program import Task
from shoal_workers.script.takeover import NOT_OF_THE_SCRIPT, NothingToContinue, take_over
from shoal_workers.script.written_files import WrittenFiles

RAY_TRAIN_DOOR = "shoal_workers.ray_train.door"
"""Imported in the script's processes alone: this one does not import Ray."""
_AFTERMATH_S = {ExitKind.COLLECTIVE_FAILED: 4.0, ExitKind.USER_ERROR: 2.0, ExitKind.WORKER_FAULT: 2.0}
"""A failed script may be the consequence of another worker's death, of which the supervisor is about to learn. For this
long the runner waits to be interrupted before it reports the failure as the script's own. A broken collective waits
longer, so that the rank that has broken it reports its error first."""
_KILL_S = 10.0
"""Time between SIGKILL to the script and the report that nothing of it is left. Then the guardian is killed."""
_WAKE_BYTES = 4096


class ScriptRunner:
    """The runner of one worker. The module docstring tells which thread may call what.

    Args:
        checkpoint_root: URL of the job's checkpoint directory, which becomes the script's SHOAL_CHECKPOINT_DIR.
        store: this worker's rendezvous store, used by the generations of which it is rank 0; `close` closes it.
        node_id: equal for the workers of one node.
        ray_address: of the worker's Ray cluster; empty: there is none.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        checkpoint_root: str,
        outbox: Outbox,
        store: StoreServer,
        node_id: str,
        ray_address: str = "",
    ) -> None:
        assert spec.script is not None
        self._spec = spec
        self._script = spec.script
        self._checkpoint_dir = checkpoint_root.removeprefix("file://")
        self._outbox = outbox
        self._store = store
        self._node_id = node_id
        self._ray_address = ray_address
        self._door = RAY_TRAIN_DOOR if spec.script.launcher is Launcher.RAY_TRAIN else ""
        self._store_connections = StoreConnections(store.key)
        self._position = Position()
        self._fence = Fence()
        self._lock = threading.Lock()
        self._current: _Generation | None = None
        self._hook = HookSocket()
        self._guardian: GuardianClient | None = None
        self._script_store: TCPStore | None = None
        """The store that the scripts of this generation use; on rank 0."""
        self._memory_kills = MemoryKills()
        self._written = WrittenFiles((self._checkpoint_dir, str(Path.cwd())), NOT_OF_THE_SCRIPT | {MEDIA})
        """Used by rank 0."""
        self._is_prepared = False

    @property
    def store_port(self) -> int:
        """Port of this worker's own rendezvous store."""
        return self._store.port

    @property
    def progress(self) -> Progress:
        """Called from any thread."""
        return self._position.progress()

    @property
    def model_shape(self) -> ModelShape | None:
        """Return None: the script's model is not known."""
        return None

    def sample_links(self) -> None:
        """Do nothing: the script's connections are not known."""

    def signs(self) -> tuple[Collective | None, tuple[Link, ...]]:
        """Return nothing, as `sample_links`."""
        return None, ()

    @property
    def pid_of_script(self) -> int:
        """Return, on any thread, the pid of the script's process; 0: none runs."""
        return self._guardian.pid_of_script if self._guardian is not None else 0

    @property
    def guardian_pid(self) -> int:
        """Return, on any thread, the pid of the guardian; 0: none was started yet, or it has died."""
        return self._guardian.pid if self._guardian is not None else 0

    def processes(self) -> set[int]:
        """Return, on any thread, the pids of the guardian and of all processes below it."""
        pid = self.guardian_pid
        return below(pid) | {pid} if pid else set()

    def prepare(self, expected_bytes: int = 0) -> None:
        """Training thread: install packages, find the script, start the guardian. Idempotent.

        Raises:
            TaskFailed: there is no such script.
            PackagesNotInstalled: what `code.pip` names cannot be installed.
        """
        if self._is_prepared:
            return
        self._position.enter(Phase.PREPARING)
        add_packages(self._spec.code, self._position.note)
        self._find_script()
        self._position.note("importing torch")
        self._live_guardian().wait_until_ready()
        self._is_prepared = True
        self._position.enter(Phase.IDLE)

    def build_model(self) -> ModelShape:
        """Raises TaskFailed: a script has no model that could be built before it runs."""
        raise _refusal(f"{self._script.words} is a script: its model is not known before it runs.", Phase.BUILDING)

    def run(self, assignment: Assignment) -> WorkerExit:
        """Training thread: run one generation. Every expected end is a WorkerExit, never an exception."""
        generation = self._enter(assignment)
        if generation is None:
            return self._exit(assignment, ExitKind.STALE, None)
        try:
            kind, error = self._run(generation)
        finally:
            self._leave(generation)
        has_output = assignment.rank == 0 and self._written.has_new()
        return self._exit(assignment, kind, error, at=generation.ended_at, has_output=has_output)

    def interrupt(self, generation: int) -> bool:
        """Control thread: fence every generation up to this one, and wake the training thread, which ends the script.

        Returns:
            Whether the training thread was in such a generation. Idempotent.
        """
        with self._lock:
            self._fence.raise_to(generation)  # first: a thread that wakes up and does not find it raised waits again
            return self._wake(generation)

    def request_yield(self, generation: int, *, durable: bool = True) -> None:
        """Control thread: end the script, which saves what it wants within its grace."""
        with self._lock:
            self._fence.request_yield(generation, durable=durable)
            self._wake(generation)

    def request_profile(self, generation: int, request: ProfileRequest) -> None:
        """Control thread: says in the job's log that there will be no profile."""
        self._outbox.log_text(f"{self._script.words} is a script, and Shoal does not profile scripts.")

    def note_commit(self, generation: int, step: int, error: str = "") -> None:
        """Do nothing: a script's checkpoints are its own."""

    def close(self) -> None:
        """Training thread, when no generation runs: ends the guardian, and closes the stores."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None
        self._script_store = None
        self._hook.close()
        self._store_connections.close()
        self._store.close()

    def _wake(self, generation: int) -> bool:
        current = self._current
        if current is None or current.number > generation:
            return False
        current.wake()
        return True

    def _enter(self, assignment: Assignment) -> _Generation | None:
        """Return None if the generation was fenced before it began."""
        with self._lock:
            # The same lock as in `interrupt`, which therefore either finds the generation, or has raised the fence
            # before.
            assert self._current is None, "one generation at a time"
            fence = self._fence.of(assignment.generation)
            if fence.is_raised:
                return None
            self._current = _Generation(assignment, self._store_connections, fence)
            self._position.begin(assignment.generation)
            return self._current

    def _leave(self, generation: _Generation) -> None:
        with self._lock:
            self._current = None
        generation.close()
        self._position.enter(Phase.IDLE)

    def _run(self, generation: _Generation) -> tuple[ExitKind, ErrorReport | None]:
        try:
            self.prepare()
            self._form(generation)
            return self._watch(generation)
        except Fenced:
            self._end_process(generation)
            return ExitKind.INTERRUPTED, None
        except TaskFailed as error:
            return ExitKind.USER_ERROR, error.report
        except FormFailed as error:
            report = _report(error, self._position.phase)
            self._end_process(generation)
            return ExitKind.FORM_FAILED, report
        except _DirectoryFailed as error:
            return ExitKind.STORAGE_FAILED, _report(error, self._position.phase)
        except GuardianLost as error:
            # Something has killed the guardian, and the script's process with it; for example the kernel, for memory.
            self._outbox.log_text(f"{error}; the script's process died with it")
            self._drop_guardian()
            return generation.ordered_end or ExitKind.SCRIPT_DIED, None

    def _form(self, generation: _Generation) -> None:
        """Rendezvous, and the start of the process: when this returns, every rank's script has begun."""
        start = time.perf_counter()
        assignment, rendezvous = generation.assignment, generation.rendezvous
        self._position.enter(Phase.FORMING)
        rendezvous.connect()
        self._make_checkpoint_dir()
        if self._spec.continue_from is not None:
            if assignment.rank == 0:
                self._take_over(self._spec.continue_from)
            rendezvous.arrive("continued", timeout_s=self._spec.timeouts.restore_s)
        if assignment.rank == 0:
            self._script_store = _store_for_scripts(assignment.store_host)
        place = Place(
            node_id=self._node_id,
            devices=os.environ.get(DEVICES, "") if self._spec.worker.gpus else "",
            store_port=self._script_store.port if self._script_store is not None and assignment.rank == 0 else 0,
        )
        places = [Place.model_validate_json(text) for text in rendezvous.gather("places", place.model_dump_json())]
        environment = environment_of(
            os.environ,
            self._spec,
            assignment,
            places,
            checkpoint_dir=self._checkpoint_dir,
            hook=self._hook.address,
            interface=find_interface(find_local_address(assignment.store_host, assignment.store_port)),
            ray_address=self._ray_address,
        )
        guardian = self._live_guardian()
        task = Task(
            self._script.file, self._script.module, [*self._script.args], environment, str(Path.cwd()), self._door
        )
        if assignment.rank == 0:
            self._written.begin()
        generation.began_at = time.time()
        guardian.run(task)
        generation.has_process = True
        rendezvous.arrive("started")
        if assignment.rank == 0:
            self._outbox.report(
                GroupFormed(
                    generation=assignment.generation,
                    at=time.time(),
                    start_step=None,
                    total_steps=None,
                    form_s=time.perf_counter() - start,
                    build_s=0.0,
                    restore_s=0.0,
                    num_parameters=0,
                )
            )

    def _make_checkpoint_dir(self) -> None:
        """An object store has no directories that could be missing."""
        if "://" in self._checkpoint_dir:
            return
        try:
            Path(self._checkpoint_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _DirectoryFailed(
                f"the job's checkpoint directory {self._checkpoint_dir} cannot be made on this node: {error.strerror}. "
                "checkpoint.url must name a place that every node can write."
            ) from error

    def _take_over(self, origin: ContinueFrom) -> None:
        url = (origin.url or "").removeprefix("file://")
        if "://" in url or "://" in self._checkpoint_dir:
            raise _refusal(
                f"continue_from.job {origin.job}: files of a script are copied between directories, and "
                f"{url if '://' in url else self._checkpoint_dir} is none. Leave continue_from out, and give the "
                "script that URL in script.args.",
                Phase.RESTORING,
            )
        self._position.enter(Phase.RESTORING)
        try:
            take_over(Path(url), Path(self._checkpoint_dir), job=origin.job, progress=self._position.note)
        except NothingToContinue as error:
            raise _refusal(str(error), Phase.RESTORING) from None
        except OSError as error:
            raise _DirectoryFailed(f"the files of {origin.job} in {url} cannot be copied: {error}") from error
        self._position.enter(Phase.FORMING)

    def _watch(self, generation: _Generation) -> tuple[ExitKind, ErrorReport | None]:
        """Until the script has ended, by itself or because it was ordered."""
        self._position.enter(Phase.SCRIPT)
        ended = self._ended(generation)
        generation.has_process = False
        if (ordered := generation.ordered_end) is not None:
            return ordered, None
        kind, error = end_of(ended, self._script.words, str(Path.cwd()))
        if kind in _AFTERMATH_S and generation.wait_for_fence(_AFTERMATH_S[kind]):
            return ExitKind.INTERRUPTED, None
        if kind is ExitKind.SCRIPT_DIED:
            error = killed(ended, self._script.words, out_of_memory=self._memory_kills.have_grown())
            self._outbox.log_text(error.message)
        return kind, error

    def _ended(self, generation: _Generation) -> Ended:
        """Follow the script to its end, and order that end when the fence says so. Raises GuardianLost."""
        guardian = self._guardian
        assert guardian is not None
        remark = self._outbox.log_text if generation.assignment.rank == 0 else lambda _: None
        steps = LoggedSteps(generation.assignment, time.time(), remark)
        event_files = self._event_files(generation)
        with _Sources(guardian, self._hook, generation) as sources:
            while True:
                if generation.must_stop and not generation.was_stopped:
                    generation.was_stopped = True
                    guardian.stop(self._script.grace_s)
                    generation.patience_mono = time.monotonic() + self._script.grace_s + _KILL_S
                if time.monotonic() >= generation.patience_mono:
                    guardian.kill()  # which ends the wait below
                if time.monotonic() >= generation.threads_mono:
                    generation.threads_mono = float("inf")
                    guardian.stop(0.0)
                until_mono = min(
                    generation.patience_mono,
                    generation.threads_mono,
                    event_files.next_mono if event_files else float("inf"),
                )
                for message in sources.wait(until_mono):
                    if "ended" in message:
                        for late in sources.rest():
                            self._take(late, steps, generation)
                        self._take_files(event_files, steps, generation, is_last=True)
                        ended = Ended(**message["ended"])
                        generation.ended_at = (ended.raised or {}).get("at") or time.time()
                        if generation.was_stopped and ended.signal == signal.SIGKILL:
                            self._outbox.log_text(self._kill_message)
                        return ended
                    self._take(message, steps, generation)
                    if "step" in message and self._script.progress is ProgressSource.AUTO:
                        event_files = None  # the script says more of itself
                self._take_files(event_files, steps, generation)

    def _take(self, message: dict[str, Any], steps: LoggedSteps, generation: _Generation) -> None:
        if "busy" in message:
            self._position.note("")
        elif "raised" in message:
            generation.threads_mono = time.monotonic() + self._script.grace_s
            self._outbox.log_text(
                f"{self._script.words} has failed on this rank, and its process goes on because of its threads; it is "
                f"ended in {self._script.grace_s:g} s (script.grace_s)"
            )
        elif "step" in message and self._script.progress in (ProgressSource.AUTO, ProgressSource.HOOK):
            self._report(message, steps, generation)

    def _event_files(self, generation: _Generation) -> EventFiles | None:
        sources = (ProgressSource.AUTO, ProgressSource.TENSORBOARD)
        if generation.assignment.rank or self._script.progress not in sources:
            return None
        named = self._spec.code.env.get(EVENTS_VARIABLE, "")
        return EventFiles((str(Path.cwd()), self._checkpoint_dir, named), generation.began_at)

    def _take_files(
        self, files: EventFiles | None, steps: LoggedSteps, generation: _Generation, *, is_last: bool = False
    ) -> None:
        for message in files.messages(is_last=is_last) if files is not None else ():
            self._report(message, steps, generation, "TensorBoard")

    def _report(
        self, message: dict[str, Any], steps: LoggedSteps, generation: _Generation, source: str = "shoal.log"
    ) -> None:
        report = steps.report_of(message, source)
        if report is not None:
            self._position.reach(report.step)
            if generation.assignment.rank == 0:
                self._outbox.report(report)

    @property
    def _kill_message(self) -> str:
        grace_s = self._script.grace_s
        return f"{self._script.words} did not end within {grace_s:g} s of SIGTERM (script.grace_s), and was killed"

    def _end_process(self, generation: _Generation) -> None:
        """End a script that began, after the rendezvous has failed."""
        generation.is_given_up = True
        if generation.has_process:
            with suppress(GuardianLost):
                self._ended(generation)
                return
            self._drop_guardian()

    def _live_guardian(self) -> GuardianClient:
        if self._guardian is not None and not self._guardian.is_alive:
            self._drop_guardian()
        if self._guardian is None:
            self._guardian = GuardianClient(self._door)
        return self._guardian

    def _drop_guardian(self) -> None:
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.kill()
            guardian.close()

    def _find_script(self) -> None:
        file = self._script.file
        if file is None or Path(file).is_file():
            return
        names = sorted(path.name for path in Path.cwd().glob("*.py"))
        beside = f"It has {', '.join(names[:10])}." if names else "It has no Python file at its top."
        raise _refusal(
            f"script.file {file} is not in the code directory of the job (code.working_dir). {beside}", Phase.PREPARING
        )

    def _exit(
        self,
        assignment: Assignment,
        kind: ExitKind,
        error: ErrorReport | None,
        *,
        at: float | None = None,
        has_output: bool = False,
    ) -> WorkerExit:
        # Always step 0: each rank knows another one, or none, and the supervisor knows it from the reports.
        return WorkerExit(
            generation=assignment.generation,
            rank=assignment.rank,
            kind=kind,
            step=0,
            error=error,
            at=at or time.time(),
            has_output=has_output,
        )


class _DirectoryFailed(OSError):
    """The message is for the user."""


class _Generation:
    """One generation in this worker. Training thread only, except `wake`."""

    def __init__(self, assignment: Assignment, connections: StoreConnections, fence: GenerationFence) -> None:
        self.assignment = assignment
        self.number = assignment.generation
        self.fence = fence
        self.rendezvous = Rendezvous(assignment, connections, fence.check)
        self.woken, self._waker = socket.socketpair()
        self.woken.setblocking(False)
        self._waker.setblocking(False)
        self.has_process = False
        self.began_at = 0.0
        """Wall-clock time just before the process was started."""
        self.is_given_up = False
        """The group did not form, so a script that has begun already must end."""
        self.was_stopped = False
        self.patience_mono = float("inf")
        self.threads_mono = float("inf")
        """When a process is ended whose script has failed, and whose threads go on."""
        self.ended_at: float | None = None
        """Wall-clock time at which the script has failed or its process has ended; None if it has not."""

    @property
    def must_stop(self) -> bool:
        return self.is_given_up or self.fence.is_raised or self.fence.is_yield_requested

    @property
    def ordered_end(self) -> ExitKind | None:
        """How the generation ends because it was ordered; None if it was not."""
        if self.fence.is_raised:
            return ExitKind.INTERRUPTED
        return ExitKind.YIELDED if self.was_stopped else None

    def wake(self) -> None:
        """Called from any thread, while the caller holds the runner's lock."""
        self.rendezvous.wake()
        with suppress(BlockingIOError):
            self._waker.send(b"x")

    def take_wake_ups(self) -> None:
        with suppress(BlockingIOError):
            self.woken.recv(_WAKE_BYTES)

    def wait_for_fence(self, timeout_s: float) -> bool:
        """Return whether the generation is over, at the latest after this time."""
        deadline_mono = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.woken, selectors.EVENT_READ)
            while not self.fence.is_raised and (left_s := deadline_mono - time.monotonic()) > 0:
                selector.select(left_s)
                self.take_wake_ups()
        return self.fence.is_raised

    def close(self) -> None:
        self.rendezvous.close()
        self.woken.close()
        self._waker.close()


class _Sources:
    """Everything that the training thread waits for while the script runs."""

    def __init__(self, guardian: GuardianClient, hook: HookSocket, generation: _Generation) -> None:
        self._guardian = guardian
        self._hook = hook
        self._generation = generation
        self._connections: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        for source, read in (
            (guardian.link.fileno(), lambda: [guardian.next_message()]),
            (hook.listener.fileno(), self._accepted),
            (generation.woken.fileno(), self._woken),
        ):
            self._selector.register(source, selectors.EVENT_READ, read)

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        self._selector.close()

    def wait(self, until_mono: float) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Raises GuardianLost."""
        left_s = until_mono - time.monotonic()
        timeout_s = None if left_s == float("inf") else max(0.05, left_s)
        messages: list[dict[str, Any]] = []
        for key, _ in self._selector.select(timeout_s):
            read: Callable[[], list[dict[str, Any]]] = key.data
            messages += read()
        return sorted(messages, key=lambda message: "ended" in message)  # the last words of the script come before

    def rest(self) -> list[dict[str, Any]]:
        """What the script has logged before its end, and was not read yet."""
        connections = self._accepted()
        for connection in self._connections:
            while message := receive(connection):
                connections.append(message)
        return connections

    def _accepted(self) -> list[dict[str, Any]]:
        while (connection := self._hook.accept()) is not None:
            self._connections.append(connection)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda accepted=connection: self._logged(accepted)
            )
        return []

    def _logged(self, connection: socket.socket) -> list[dict[str, Any]]:
        message = receive(connection)
        if message is None:
            self._selector.unregister(connection)
            self._connections.remove(connection)
            connection.close()
        return [message] if message else []

    def _woken(self) -> list[dict[str, Any]]:
        self._generation.take_wake_ups()
        return []


def _store_for_scripts(host: str) -> TCPStore:
    """On the address that the workers already use; by itself TCPStore would listen on all of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1024) as listener:
        port = listener.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))


def _refusal(message: str, phase: Phase) -> TaskFailed:
    return TaskFailed(ErrorReport(type="ScriptRefused", message=message, traceback="", phase=phase, mistake=REFUSED))


def _report(error: Exception, phase: Phase) -> ErrorReport:
    return ErrorReport(
        type=type(error).__name__,
        message=text_of(error),
        traceback="".join(traceback.format_exception(error)),
        phase=phase,
        error_class=ErrorClass.PLAIN,
    )
