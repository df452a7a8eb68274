"""The soak's printed log: one line per fault, repair and finding, and the jobs' state after each repair."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from shoal_api.client import Client
from shoal_service.views import IncidentView
from soak.faults import steps_bound


class Timeline:
    def __init__(self, log: Path) -> None:
        """`log`: receives everything that is printed."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w", buffering=1)
        self._begun_mono = time.monotonic()
        self.violations: list[str] = []
        self._shown: set[tuple[str, int, int]] = set()
        """Incidents that were printed: job, attempt, number."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_mono

    def say(self, kind: str, text: str) -> None:
        minutes, seconds = divmod(self.elapsed_s, 60)
        line = f"{int(minutes):02d}:{seconds:04.1f}  {kind:<14} {text}"
        print(line, flush=True)
        self._log.write(line + "\n")

    def violation(self, text: str) -> None:
        self.violations.append(text)
        self.say("VIOLATION", text)

    def show_incidents(self, client: Client, jobs: Mapping[str, str], fault: str | None) -> None:
        """Print the incidents that were closed since the last call, and hold them to their bound.

        Args:
            fault: the only one since then; None: several, whose incidents may have no bound.
        """
        for name, job_id in jobs.items():
            for one in client.incidents(job_id):
                key = (job_id, one.attempt, one.id)
                if one.closed and key not in self._shown:
                    self._shown.add(key)
                    self.say(
                        "incident",
                        f"{name}: {one.cause} ({one.witness}), {one.from_workers} -> {one.to_workers} workers from "
                        f"{one.state_source}, {one.steps_lost} steps lost, {one.recovery_s or 0.0:.2f} s: {one.action}",
                    )
                    if fault is not None:
                        self._hold_to_bound(name, one, fault)

    def _hold_to_bound(self, name: str, incident: IncidentView, fault: str) -> None:
        """A lost node costs what the status said before; every other fault what the matrix says."""
        if incident.node_loss is not None and incident.node_loss.at_most is None:
            return
        bound = incident.node_loss.at_most if incident.node_loss is not None else steps_bound(fault)
        lost = incident.steps_lost or 0
        if bound is not None and lost > bound:
            words = f"; {incident.node_loss.describe()}" if incident.node_loss else ""
            self.violation(f"{name}: {fault} cost {lost} completed steps, and at most {bound} are allowed{words}")

    def show_jobs(self, client: Client, jobs: Mapping[str, str]) -> None:
        shown = []
        for name, job_id in jobs.items():
            status = client.job(job_id).status
            ratio = status.goodput.ratio if status.goodput else None
            goodput = f", goodput {ratio:.0%}" if ratio is not None else ""
            shown.append(
                f"{name}: {status.state} step {status.step}, {status.workers} workers, "
                f"{status.incidents} incidents, {status.steps_lost} steps lost{goodput}"
            )
        self.say("jobs", "; ".join(shown))
