"""The soak's printed log: one line per fault, repair and finding, and the jobs' state after each repair."""

from __future__ import annotations

import time
from collections.abc import Mapping

from shoal_api.client import Client


class Timeline:
    def __init__(self) -> None:
        self._begun_mono = time.monotonic()
        self.violations: list[str] = []
        self._shown: set[tuple[str, int, int]] = set()
        """Incidents that were printed: job, attempt, number."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_mono

    def say(self, kind: str, text: str) -> None:
        minutes, seconds = divmod(self.elapsed_s, 60)
        print(f"{minutes:02.0f}:{seconds:04.1f}  {kind:<14} {text}", flush=True)

    def violation(self, text: str) -> None:
        self.violations.append(text)
        self.say("VIOLATION", text)

    def show_incidents(self, client: Client, jobs: Mapping[str, str]) -> None:
        """Print the incidents that were closed since the last call."""
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
