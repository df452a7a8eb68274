"""SupervisorActor: the Ray shell around one executor. Detached, named, and restarted by Ray when its process dies."""

from __future__ import annotations

import asyncio
import threading
import traceback

import ray
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.executor import Executor
from shoal_service.supervisor.journal import Journal
from shoal_service.supervisor.newsdesk import Newsdesk
from shoal_service.views import AttemptEnd, SupervisorNews, UserFailure
from shoal_workers.contract.job import EndReason

_SEQ_JUMP = 1 << 32
CONCURRENCY_GROUPS = {"pull": 4, "direct": 4}


class SupervisorActor:
    """Answers the control plane that holds the newest lease epoch; older ones get StaleEpoch."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._journal = Journal(config.job_id, config.attempt)
        entry = self._journal.read()
        self._epoch = config.epoch
        if entry is None:
            self._newsdesk = Newsdesk(config.attempt)
        else:
            # numbers handed out since the entry was written are unknown: jump far beyond any of them
            self._newsdesk = Newsdesk(config.attempt, seq=entry.seq + _SEQ_JUMP, untold=entry.untold)
        self._executor = Executor(config, self._journal, self._newsdesk, entry)
        threading.Thread(target=self._live, name="executor", daemon=True).start()

    @ray.method(concurrency_group="pull")
    def pull(self, after: int, wait_s: float, epoch: int) -> SupervisorNews:
        """News after sequence number `after`, which acknowledges everything up to it. Long poll."""
        self._check(epoch)
        return self._newsdesk.pull(after, wait_s)

    @ray.method(concurrency_group="direct")
    def direct(self, directive: Directive) -> None:
        """What the control plane wants now."""
        self._check(directive.epoch)
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

    def _live(self) -> None:
        """The process boundary's one catch-all: an error of our own ends the attempt with its traceback."""
        try:
            asyncio.run(self._executor.run())
        except Exception as error:
            failure = UserFailure(
                type=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                phase="supervising",
                ranks=(),
                step=0,
            )
            self._newsdesk.end(
                AttemptEnd(
                    reason=EndReason.INTERNAL, message=f"supervisor: {failure.type}: {error}", step=0, failure=failure
                )
            )
