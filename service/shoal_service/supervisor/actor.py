"""SupervisorActor: the Ray shell around one executor. Detached, named, and restarted by Ray when its worker dies."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback

import ray
from shoal_service.planner import plan_ahead
from shoal_service.reports import AttemptEnd, SupervisorReports
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.executor import Executor
from shoal_service.supervisor.journal import Journal
from shoal_service.supervisor.outbox import Outbox
from shoal_service.supervisor.reporter import Reporter
from shoal_service.supervisor.restart_limit import MAX_SHORT_LIVES, SHORT_LIFE_S, is_crash_loop
from shoal_service.views import UserFailure
from shoal_workers.contract.job import EndReason
from shoal_workers.raylet import end_with_raylet

_SEQ_JUMP = 1 << 32
CONCURRENCY_GROUPS = {"pull": 4, "direct": 4}


class SupervisorActor:
    """Answers the control plane that holds the newest lease epoch; older ones get StaleEpoch."""

    def __init__(self, config: SupervisorConfig) -> None:
        end_with_raylet()
        self._config = config
        self._epoch = config.epoch
        self._journal = Journal(config.job_id, config.attempt)
        self._outbox = Outbox(config.attempt)
        self._executor = self._prepare()
        if self._executor is not None:
            threading.Thread(target=self._live, args=(self._executor,), name="executor", daemon=True).start()
            # so that a group which has to re-form never waits for arithmetic
            threading.Thread(target=plan_ahead, args=(config.spec, config.profile), name="planner", daemon=True).start()

    @ray.method(concurrency_group="pull")
    def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorReports:
        """News after sequence number `after`, which acknowledges everything up to it. Long poll."""
        self._check(epoch)
        return self._outbox.pull(after, wait_s)

    @ray.method(concurrency_group="direct")
    def direct(self, directive: Directive) -> None:
        """What the control plane wants now."""
        self._check(directive.epoch)
        if self._executor is not None:
            self._executor.direct(directive)

    @ray.method(concurrency_group="direct")
    def release(self, epoch: int) -> None:
        """The end was stored: nothing of this attempt needs to be remembered."""
        self._check(epoch)
        self._journal.delete()

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(epoch, self._epoch)
        self._epoch = epoch

    def _prepare(self) -> Executor | None:
        """None: the attempt has ended. An actor whose constructor raises could not even say why."""
        try:
            return self._resume()
        except Exception as error:
            self._fail(error)
            return None

    def _resume(self) -> Executor | None:
        config, entry = self._config, self._journal.read()
        births = self._journal.note_birth(time.time())
        if entry is not None:
            # numbers handed out since the entry was written are unknown: jump far beyond any of them
            self._outbox = Outbox(config.attempt, seq=entry.seq + _SEQ_JUMP, unacknowledged=entry.unacknowledged)
        if not is_crash_loop(births):
            return Executor(config, self._journal, self._outbox, entry)
        if entry is not None:
            Reporter(self._outbox, config).show(entry.state)
        self._end(
            f"the supervisor of attempt {config.attempt} died {MAX_SHORT_LIVES} times in a row within "
            f"{SHORT_LIFE_S:g} s of its start. The logs of the Ray workers on its node say why.",
            step=entry.state.progress.step if entry is not None else 0,
        )
        return None

    def _live(self, executor: Executor) -> None:
        """The worker boundary's one catch-all: an error of our own ends the attempt with its traceback."""
        try:
            asyncio.run(executor.run())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        failure = UserFailure(
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            phase="supervising",
            ranks=(),
            step=0,
        )
        self._end(f"supervisor: {failure.type}: {error}", failure=failure)

    def _end(self, message: str, *, step: int = 0, failure: UserFailure | None = None) -> None:
        """Whoever stores this also kills what is left of the attempt."""
        self._outbox.end(AttemptEnd(reason=EndReason.INTERNAL, message=message, step=step, failure=failure))
