"""Dialer: two threads that connect a supervisor with the service.

    reports     outbox -> report -> receipt -> outbox drops what is stored     at once, and at least every second
    directive   long poll -> directive -> supervisor

While the service is away both try again, after pauses that double from 0.1 s to 2 s with jitter, and the outbox keeps
the reports. Every report says what was acknowledged; the receipt has the last word on it, so that a report whose answer
was lost is not stored twice, and a supervisor that was restarted learns what its predecessor has reported.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from pydantic import ValidationError

from shoal_service.home import HomeReport
from shoal_service.supervisor.config import Directive, StaleEpoch
from shoal_service.supervisor.home.link import HomeAway, HomeLink, HomeRefused, HomeReplaced
from shoal_service.supervisor.journal import end_replaced_process
from shoal_service.supervisor.protocols import Journal
from shoal_service.supervisor.reporting.outbox import Outbox

SIGN_S = 1.0
"""Most seconds between two reports, so that the service sees that the supervisor lives."""
_PACE_S = 0.1
"""Pause between two reports, so that the steps of a fast job are stored in batches and not in one transaction each."""
_WAIT_S = 20.0
"""Longest time for which the service may hold the long poll."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_log = logging.getLogger(__name__)


class Dialer:
    def __init__(
        self,
        link: HomeLink,
        outbox: Outbox,
        journal: Journal,
        direct: Callable[[Directive], None],
        release: Callable[[], None],
        *,
        on_replaced: Callable[[], None] = end_replaced_process,
    ) -> None:
        """
        Args:
            journal: has the life of this supervisor.
            direct: may raise StaleEpoch.
            release: called once, when the end of the attempt is stored.
            on_replaced: must not return; it ends this process, which has a successor.
        """
        self._link = link
        self._outbox = outbox
        self._journal = journal
        self._direct = direct
        self._release = release
        self._on_replaced = on_replaced
        self._is_over = threading.Event()

    def start(self) -> None:
        for target in (self.report_until_released, self.obey_until_released):
            threading.Thread(target=target, name="home", daemon=True).start()

    def report_until_released(self) -> None:
        acknowledged, is_first = 0, True
        pauses = _Pauses("reports")
        while True:
            sent_mono = time.monotonic()
            try:
                acknowledged, is_released = self._report(acknowledged, 0.0 if is_first else SIGN_S)
            except HomeAway as error:
                self._is_over.wait(pauses.next_s(error))
                continue
            except HomeRefused as error:  # its token may have ended because it has a successor, or was reaped
                self._is_over.wait(pauses.next_s(error))
                self._journal.require_current()
                continue
            except HomeReplaced as error:
                _log.warning("supervisor.refused", extra={"reason": str(error)})
                self._on_replaced()
                return
            is_first = False
            if pauses.end():
                self._link.hurry()
            if is_released:
                self._is_over.set()
                self._link.hurry()
                self._release()
                return
            self._is_over.wait(max(0.0, sent_mono + _PACE_S - time.monotonic()))

    def _report(self, acknowledged: int, wait_s: float) -> tuple[int, bool]:
        """Sends one report. Returns the number up to which reports are acknowledged now, and whether the attempt's end
        is stored."""
        found = self._outbox.pull(acknowledged, wait_s)
        reports = found if self._outbox.has_status else None
        receipt = self._link.report(HomeReport(life=self._journal.life, after=acknowledged, reports=reports))
        return receipt.acknowledged, receipt.released

    def obey_until_released(self) -> None:
        after = 0
        pauses = _Pauses("directive")
        while not self._is_over.is_set():
            try:
                answer = self._link.directive(after, _WAIT_S)
            except (HomeAway, HomeRefused) as error:
                self._is_over.wait(pauses.next_s(error))
                continue
            except HomeReplaced:
                return  # the reports have the same answer
            pauses.end()
            if answer.directive is not None:
                after = answer.number
                self._obey(answer.directive)

    def _obey(self, document: object) -> None:
        try:
            self._direct(Directive.model_validate(document, extra="ignore"))
        except StaleEpoch as error:
            _log.warning("supervisor.stale_directive", extra={"error": str(error)})
        except ValidationError as error:
            _log.error("supervisor.unknown_directive", extra={"error": str(error)[:500]})


class _Pauses:
    """Doubling pauses between calls that fail."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pause_s = 0.0

    def next_s(self, error: HomeAway | HomeRefused) -> float:
        if not self._pause_s:
            _log.warning("home.away", extra={"what": self._what, "error": str(error)[:500]})
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        if isinstance(error, HomeRefused):
            self._pause_s = _LONGEST_PAUSE_S
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        return max(pause_s, error.retry_after_s) if isinstance(error, HomeAway) else pause_s

    def end(self) -> bool:
        """Ends the pauses, because a call has succeeded. Returns whether calls had failed before it."""
        was_away, self._pause_s = self._pause_s > 0, 0.0
        if was_away:
            _log.info("home.back", extra={"what": self._what})
        return was_away
