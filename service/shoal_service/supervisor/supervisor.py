"""Supervisor: one attempt's supervisor without its Ray actor. Opens the attempt, runs the executor, and dials home.

Made by `supervisor/actor.py`. It never raises an error of the attempt: such an error ends the attempt with a report.
Hidden here: how an attempt begins, how it goes on after the supervisor was restarted, and when it does not any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from shoal_service.clock import Clock
from shoal_service.core import goodput
from shoal_service.core.attempt.incidents import open_after_loss
from shoal_service.core.attempt.state import (
    Attempt,
    AttemptConfig,
    CheckpointIndex,
    Code,
    GroupProgress,
    History,
    Opening,
    Starting,
    Target,
)
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import JournalDamaged
from shoal_service.core.supervisor_starts import ProcessEnd, describe_lack_of_memory
from shoal_service.planner import plan_ahead
from shoal_service.reports import PendingEvent, StacksAnswer
from shoal_service.supervisor.config import Directive, StacksRequest, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.dialer import Dialer, HomeLink
from shoal_service.supervisor.executor import Executor
from shoal_service.supervisor.protocols import Journal, World
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter
from shoal_workers.contract import EndReason, UserFailure

_log = logging.getLogger(__name__)
_SEQ_JUMP = 1 << 32


class Supervisor:
    """Obeys the control plane with the newest lease epoch. Its methods may be called from any thread."""

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
            last_ends: how the last processes of this supervisor have ended, oldest first; their number is limited.
        """
        self._config = config
        self._journal = journal
        self._clock = clock
        self._make_world = make_world
        self._last_ends = last_ends
        self._epoch = config.epoch
        self.outbox = Outbox(config.attempt)
        self._stacks_number = 0
        """Number of the last request for stacks that was followed."""
        self._lock = threading.Lock()
        """Guards the epoch and `_stacks_number`."""
        self._executor: Executor | None = None
        self._executor = self._prepare()

    def start(self, link: HomeLink | None = None) -> None:
        """Runs the executor on a thread of its own, and dials home through `link`, if there is one."""
        if link is not None:
            Dialer(link, self.outbox, self._journal, self.direct, self.release).start()
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

    def direct(self, directive: Directive) -> None:
        """Obeys what the control plane wants now. Raises StaleEpoch: a directive with a higher epoch was obeyed
        before."""
        with self._lock:
            if directive.epoch < self._epoch:
                raise StaleEpoch(directive.epoch, self._epoch)
            if directive.epoch > self._epoch:
                # before it is obeyed: a restarted supervisor must not obey an older one
                self._journal.obey(directive.epoch)
                self._epoch = directive.epoch
            request = directive.stacks
            is_new = request is not None and request.number != self._stacks_number
            if request is not None:
                self._stacks_number = request.number
        if self._executor is not None:
            self._executor.direct(directive.model_copy(update={"stacks": None}))
        if request is not None and is_new:
            threading.Thread(target=self._answer, args=(request,), name="stacks", daemon=True).start()

    def release(self) -> None:
        """Deletes the journal: the end is stored, so it is not needed any more."""
        self._journal.delete()

    def _answer(self, request: StacksRequest) -> None:
        """Takes the stacks and puts them into the outbox. Takes some seconds at most."""
        taken = None
        if self._executor is not None:
            try:
                taken = self._executor.inspection.stacks.take_on_request(request.rank, native=request.native)
            except Exception as error:  # e.g. the attempt has ended; it must not end for this
                _log.warning("supervisor.no_stacks", extra={"error": repr(error)})
        self.outbox.answer(StacksAnswer(number=request.number, stacks=taken))

    def _prepare(self) -> Executor | None:
        """Opens the attempt; None if it has ended. Nothing is raised: an actor whose constructor raises cannot report
        why."""
        try:
            return self._open()
        except Exception as error:
            self._fail(error)
            return None

    def _open(self) -> Executor | None:
        config, beginning = self._config, self._journal.begin(self._clock.time())
        entry, self._epoch = beginning.entry, max(config.epoch, beginning.epoch)
        if entry is not None:
            # items may have been numbered since the entry was written: the jump goes far beyond their numbers
            self.outbox = Outbox(config.attempt, seq=entry.seq + _SEQ_JUMP, unacknowledged=entry.unacknowledged)
        if beginning.num_lost:
            self.outbox.add(PendingEvent.of(JournalDamaged(lost=beginning.num_lost), self._clock.time()))
        if is_crash_loop(beginning.starts):
            if entry is not None:
                Reporter(self.outbox, config, self._clock).update_status(entry.state)
            why = describe_lack_of_memory(self._last_ends(MAX_SHORT_RUNS))
            self._end(
                f"the supervisor of attempt {config.attempt} died {MAX_SHORT_RUNS} times in a row within "
                f"{SHORT_RUN_S:g} s of its start. {why or 'See the logs of the Ray workers on its node.'}",
                reason=EndReason.WORKERS_FAILED if why else EndReason.INTERNAL,
                step=entry.state.progress.step if entry is not None else 0,
            )
            return None
        state = entry.state if entry is not None else new_attempt(config, self._clock.time())
        state = replace(state, life=beginning.life)
        return Executor(config, state, entry, self.outbox, self._make_world(beginning.life))

    def _run(self, executor: Executor) -> None:
        """Runs the executor. This is the one catch-all of this process: an error of Shoal's own ends the attempt with
        its traceback."""
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
        """Reports the end of the attempt. The control plane stores it and kills the attempt's remaining actors."""
        self.outbox.add_end(AttemptEnd(reason=reason, message=message, step=step, failure=failure))


def new_attempt(config: SupervisorConfig, now: float) -> Attempt:
    """The state with which an attempt begins, if there is no journal entry. A script has its own checkpoints, so none
    is looked for, and the newest step of the attempts before is kept until it reports one."""
    is_script = config.spec.script is not None
    done = config.goodput.max_step if is_script and config.goodput is not None else 0
    incident = open_after_loss(config.lost, now) if config.lost is not None else None
    origin = config.spec.continue_from
    return Attempt(
        config=AttemptConfig(
            job_id=config.job_id,
            attempt=config.attempt,
            checkpoint_root=config.checkpoint_root,
            timeouts=config.timeouts.with_spec(config.spec.timeouts),
            profile=config.profile,
        ),
        target=Target(spec=config.spec, granted=config.granted, avoided=config.avoid, pinned=config.pinned),
        current=Starting(since=now) if is_script else Opening(since=now),
        progress=GroupProgress(step=done),
        code=Code(current=config.spec.code.archive or ""),
        checkpoints=CheckpointIndex(expected=config.newest, origin=origin.checkpoint if origin is not None else None),
        history=History(standing=config.standing, num_incidents=0 if incident is None else incident.id),
        incident=incident,
        ledger=goodput.resume(config.goodput, at=now),
    )


MAX_SHORT_RUNS = 8
SHORT_RUN_S = 15.0


def is_crash_loop(starts: Sequence[float]) -> bool:
    """Return whether a supervisor that Ray restarts again and again should end.

    It should when each of the last MAX_SHORT_RUNS runs ended within SHORT_RUN_S seconds of its start.

    A supervisor that dies from time to time is restarted without limit: a machine may be lost every minute. When all of
    the last runs were short, the cause is one that another restart does not remove.

    Args:
        starts: when each run of one attempt's supervisor began, wall-clock seconds, oldest first, this run included.
    """
    last = starts[-MAX_SHORT_RUNS - 1 :]
    return len(last) > MAX_SHORT_RUNS and all(later - earlier < SHORT_RUN_S for earlier, later in pairwise(last))
