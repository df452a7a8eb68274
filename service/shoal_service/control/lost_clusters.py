"""LostClusters: measures for how long clusters and the supervisors in them are silent, while this process is awake.

A control plane that was suspended, or has just taken over, has seen no silence. Called by the control loop in each
pass; `core/lost_clusters.py` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal_service.clock import Clock
from shoal_service.clusters.snapshot import AttemptKey

_PASS_S = 2.0
"""More than this between two passes counts as this much: the process may have been suspended."""


class LostClusters:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_mono = clock.monotonic()
        self._clusters: dict[str, float] = {}
        """Seconds of silence."""
        self._supervisors: dict[AttemptKey, tuple[float, float]] = {}
        """When each has reported last, and seconds of silence since."""

    def observe(self, away: Collection[str], reported_at: Mapping[AttemptKey, float]) -> None:
        """With each pass.

        Args:
            away: clusters that do not answer.
            reported_at: of the attempts in these clusters, when their supervisors have reported last.
        """
        now_mono = self._clock.monotonic()
        passed_s = min(_PASS_S, now_mono - self._looked_mono)
        self._looked_mono = now_mono
        self._clusters = {name: self._clusters.get(name, -passed_s) + passed_s for name in away}
        before, self._supervisors = self._supervisors, {}
        for key, at in reported_at.items():
            known_at, silent_s = before.get(key, (at, -passed_s))
            self._supervisors[key] = (at, silent_s + passed_s if known_at == at else 0.0)

    def silent_s(self, cluster: str, key: AttemptKey) -> tuple[float, float]:
        """Seconds of silence: of the cluster, and of the supervisor."""
        return self._clusters.get(cluster, 0.0), self._supervisors.get(key, (0.0, 0.0))[1]
