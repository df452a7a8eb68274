"""CulpritFinder: names whom an incident or a slow-down suspects, as an event and as a part of the incident.

    report of a step        ->  core/culprit/slow_steps.py; if only the waiting has grown, the links are looked at
    an incident is open     ->  its stacks name the suspect (StackTaker), or its exits and its cause

Made and called by the executor, on its loop. It decides nothing about the attempt, and delays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from shoal_service.core.attempt.events import Event, ReportArrived
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.culprit.incident_suspects import suspect_of
from shoal_service.core.culprit.slow_steps import Pace, SlowDown, step_done
from shoal_service.core.events.workers import StepsSlow
from shoal_service.supervisor.reporting.reporter import Reporter
from shoal_service.supervisor.stack_taker import StackTaker
from shoal_workers.contract.errors.suspects import Suspect
from shoal_workers.contract.worker_reports import StepReport


class CulpritFinder:
    def __init__(
        self,
        stacks: StackTaker,
        reporter: Reporter,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        state: Callable[[], Attempt],
    ) -> None:
        """See StackTaker for the arguments."""
        self._stacks = stacks
        self._reporter = reporter
        self._spawn = spawn
        self._state = state
        self._pace = Pace()
        self._named: tuple[int, Suspect] | None = None
        """The incident whose suspect was found without stacks, and that suspect."""

    def consider(self, events: Iterable[Event]) -> None:
        """After each turn of the machine."""
        state = self._state()
        for event in events:
            if isinstance(event, ReportArrived) and isinstance(event.item, StepReport):
                self._step_done(event.item, state)
        incident = state.incident
        if incident is None or self._stacks.named == incident.id:
            return
        suspect = suspect_of(incident, tuple(state.group.exits.values()), all_left=state.all_left)
        if suspect is not None and (self._named is None or not _is_same(self._named, incident.id, suspect)):
            self._named = incident.id, suspect
            self._reporter.keep_suspect(incident.id, suspect)

    def _step_done(self, report: StepReport, state: Attempt) -> None:
        if report.generation != state.group.generation:
            return
        self._pace, found = step_done(self._pace, report)
        if found is None:
            return
        if found.suspect is not None:
            self._say(found, found.suspect)
        else:
            self._spawn(self._look_at_links(found))

    async def _look_at_links(self, found: SlowDown) -> None:
        self._say(found, await self._stacks.links())

    def _say(self, found: SlowDown, suspect: Suspect | None) -> None:
        self._reporter.event(StepsSlow(step=found.step, usual_s=found.usual_s, now_s=found.now_s, suspect=suspect))


def _is_same(named: tuple[int, Suspect], incident_id: int, suspect: Suspect) -> bool:
    """The words of a death come later than the death; that is no new suspicion."""
    return named[0] == incident_id and (named[1].resource, named[1].ranks) == (suspect.resource, suspect.ranks)
