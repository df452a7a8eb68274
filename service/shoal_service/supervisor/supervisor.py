"""Supervisor: one attempt's supervisor without its Ray actor. Runs the executor, answers the control plane.

Made by `supervisor/actor.py`. It never raises an error of the attempt: such an error ends the attempt with a report.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shoal_service.clock import Clock
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.service import JournalDamaged, SupervisorRefusedCall
from shoal_service.core.supervisor_starts import ProcessEnd, lack_of_memory
from shoal_service.planner import plan_ahead
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.signing.calls import (
    CallName,
    CallRefused,
    PullArguments,
    ReleaseArguments,
    SignedCall,
    StacksArguments,
)
from shoal_service.signing.gate import Gate, RefusedCalls
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.executor import Executor
from shoal_service.supervisor.new_attempt import new_attempt
from shoal_service.supervisor.protocols import Journal, World
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.supervisor.restart_limit import MAX_SHORT_RUNS, SHORT_RUN_S, is_crash_loop
from shoal_workers.contract.job import EndReason, UserFailure
from shoal_workers.contract.messages import Stacks

_log = logging.getLogger(__name__)
_SEQ_JUMP = 1 << 32


class Supervisor:
    """Obeys the control plane with the newest lease epoch; calls with an older one raise StaleEpoch.

    If the attempt has a key, only calls that it has signed are obeyed; others raise CallRefused, and an event says so.
    The methods for calls may be called from any thread.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        journal: Journal,
        clock: Clock,
        make_world: Callable[[int], World],
        last_ends: Callable[[int], Sequence[ProcessEnd]] = lambda number: (),
    ) -> None:
        """
        Args:
            make_world: called once, with this supervisor's life, and not at all if the attempt ends here; its errors
                end the attempt.
            last_ends: how the last processes of this supervisor have ended, so many at most, oldest first.
        """
        self._config = config
        self._journal = journal
        self._clock = clock
        self._make_world = make_world
        self._last_ends = last_ends
        self._epoch = config.epoch
        self._outbox = Outbox(config.attempt)
        self._gate = Gate(config.public_key, config.job_id, config.attempt)
        self._refused = RefusedCalls()
        self._lock = threading.Lock()
        """Of the epoch and of `_refused`."""
        self._executor: Executor | None = None
        self._executor = self._prepare()

    def start(self) -> None:
        """Run the executor on a thread of its own."""
        if self._executor is None:
            return
        config = self._config
        threading.Thread(target=self._run, args=(self._executor,), name="executor", daemon=True).start()
        # plans the layouts of all world sizes now, so that a group that re-forms does not wait for the planner
        threading.Thread(target=plan_ahead, args=(config.spec, config.profile), name="planner", daemon=True).start()

    def log_fields(self) -> dict[str, object]:
        """Fields of every log event of this supervisor."""
        executor = self._executor
        generation = executor.generation if executor is not None else None
        return {"job": self._config.job_id, "attempt": self._config.attempt, "generation": generation}

    def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorReports:
        """Long poll: everything reported after sequence number `after`, which acknowledges everything up to it."""
        with self._refusals():
            self._gate.require_no_key(CallName.PULL)
        return self._pull(after, wait_s, epoch)

    def signed_pull(self, call: SignedCall) -> SupervisorReports:
        with self._refusals():
            epoch, wanted = self._gate.opened(call, CallName.PULL, PullArguments)
        return self._pull(wanted.after, wanted.wait_s, epoch)

    def direct(self, directive: Directive) -> None:
        with self._refusals():
            self._gate.require_no_key(CallName.DIRECT)
        self._direct(directive, directive.epoch)

    def signed_direct(self, call: SignedCall) -> None:
        with self._refusals():
            epoch, directive = self._gate.opened(call, CallName.DIRECT, Directive)
        self._direct(directive, epoch)

    def stacks(self, rank: int | None, native: bool, epoch: int) -> Stacks | None:
        """What all workers do now, or one rank; None: the attempt is over. Takes some seconds at most."""
        with self._refusals():
            self._gate.require_no_key(CallName.STACKS)
        return self._stacks(rank, native, epoch)

    def signed_stacks(self, call: SignedCall) -> Stacks | None:
        with self._refusals():
            epoch, wanted = self._gate.opened(call, CallName.STACKS, StacksArguments)
        return self._stacks(wanted.rank, wanted.native, epoch)

    def release(self, epoch: int) -> None:
        """The end is stored: the journal is not needed any more."""
        with self._refusals():
            self._gate.require_no_key(CallName.RELEASE)
        self._release(epoch)

    def signed_release(self, call: SignedCall) -> None:
        with self._refusals():
            epoch, _ = self._gate.opened(call, CallName.RELEASE, ReleaseArguments)
        self._release(epoch)

    def _pull(self, after: int, wait_s: float, epoch: int) -> SupervisorReports:
        self._check(epoch)
        return self._outbox.pull(after, wait_s)

    def _direct(self, directive: Directive, epoch: int) -> None:
        self._check(epoch)
        with self._refusals():
            self._gate.require_order(epoch, directive.number)
        if self._executor is not None:
            self._executor.direct(directive)

    def _stacks(self, rank: int | None, native: bool, epoch: int) -> Stacks | None:
        self._check(epoch)
        return self._executor.inspection.stacks.requested(rank, native=native) if self._executor is not None else None

    def _release(self, epoch: int) -> None:
        self._check(epoch)
        self._journal.delete()

    def _check(self, epoch: int) -> None:
        with self._lock:
            if epoch < self._epoch:
                raise StaleEpoch(epoch, self._epoch)
            if epoch > self._epoch:
                self._journal.obey(epoch)  # before it is obeyed: a restarted supervisor must not obey an older one
                self._epoch = epoch

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """A refused call becomes an event, and its caller gets the error."""
        try:
            yield
        except CallRefused as error:
            with self._lock:
                number = self._refused.add(error, self._clock.monotonic())
            if number is not None:
                event = SupervisorRefusedCall(call=error.call, refusal=error.refusal, number=number, message=str(error))
                _log.warning("supervisor.refused_call", extra={"error": str(error), "number": number})
                self._outbox.add(PendingEvent.of(event, self._clock.time()))
            raise

    def _prepare(self) -> Executor | None:
        """None: the attempt has ended. Nothing is raised: an actor whose constructor raises cannot report why."""
        try:
            return self._open()
        except Exception as error:
            self._fail(error)
            return None

    def _open(self) -> Executor | None:
        config, beginning = self._config, self._journal.begin(self._clock.time())
        entry, self._epoch = beginning.entry, max(config.epoch, beginning.epoch)
        if entry is not None and entry.directive is not None:
            self._gate.require_order(entry.directive.epoch, entry.directive.number)
        if entry is not None:
            # items may have been numbered since the entry was written: the jump goes far beyond their numbers
            self._outbox = Outbox(config.attempt, seq=entry.seq + _SEQ_JUMP, unacknowledged=entry.unacknowledged)
        if beginning.num_lost:
            self._outbox.add(PendingEvent.of(JournalDamaged(lost=beginning.num_lost), self._clock.time()))
        if is_crash_loop(beginning.starts):
            if entry is not None:
                Reporter(self._outbox, config, self._clock).show(entry.state)
            why = lack_of_memory(self._last_ends(MAX_SHORT_RUNS))
            self._end(
                f"the supervisor of attempt {config.attempt} died {MAX_SHORT_RUNS} times in a row within "
                f"{SHORT_RUN_S:g} s of its start. {why or 'See the logs of the Ray workers on its node.'}",
                reason=EndReason.WORKERS_FAILED if why else EndReason.INTERNAL,
                step=entry.state.progress.step if entry is not None else 0,
            )
            return None
        state = entry.state if entry is not None else new_attempt(config, self._clock.time())
        state = replace(state, life=beginning.life)
        return Executor(config, state, entry, self._outbox, self._make_world(beginning.life))

    def _run(self, executor: Executor) -> None:
        """The one catch-all of this process: an error of Shoal's own ends the attempt with its traceback."""
        try:
            asyncio.run(executor.run())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("supervisor.failed", exc_info=error)
        failure = UserFailure(
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            phase="supervising",
            ranks=(),
            step=0,
        )
        self._end(f"supervisor: {failure.type}: {error}", failure=failure)

    def _end(
        self,
        message: str,
        *,
        reason: EndReason = EndReason.INTERNAL,
        step: int = 0,
        failure: UserFailure | None = None,
    ) -> None:
        """The control plane stores this and kills the attempt's remaining actors."""
        self._outbox.add_end(AttemptEnd(reason=reason, message=message, step=step, failure=failure))
