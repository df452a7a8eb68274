"""Pruner: ends the jobs of sweeps that are worse than the others. Looks again when one of them has trained on.

Called by the control loop in each pass, on a worker thread. The rule is `core/sweeps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shoal_service.core.desired import Desired
from shoal_service.core.job_machine import ACTIVE
from shoal_service.core.sweeps import Rule, rule_of
from shoal_service.store import sweep_jobs
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_workers.contract.spec import JobSpec

_LOOK_S = 2.0
"""Not more often."""


class Pruner:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, int] = {}
        """Steps of the jobs at the last look."""
        self._looked_mono = float("-inf")
        """Monotonic time of the last look."""

    def look(self, rows: Iterable[DriveRow], mono: float, *, epoch: int, now: float) -> None:
        """Raises LeaseLost."""
        mine = {row.id: row for row in rows if _may_be_pruned(row)}
        steps = {job_id: row.status.step for job_id, row in mine.items()}
        if not mine or steps == self._seen or mono - self._looked_mono < _LOOK_S:
            return
        self._seen, self._looked_mono = steps, mono
        sweeps: dict[tuple[str, str], dict[str, Rule]] = defaultdict(dict)
        for job_id, row in mine.items():
            sweeps[_sweep_of(row.spec)][job_id] = _rule_of(row.spec)
        for (project, sweep), rules in sweeps.items():
            for job_id, worse in self._store.reading(sweep_jobs.compare)(project, sweep, rules).items():
                with self._store.write(epoch) as tx:
                    sweep_jobs.prune(tx, job_id, sweep, worse, rules[job_id], now=now)


def _may_be_pruned(row: DriveRow) -> bool:
    sweep = row.spec.sweep
    return sweep is not None and sweep.prune is not None and row.state in ACTIVE and row.desired is Desired.RUN


def _sweep_of(spec: JobSpec) -> tuple[str, str]:
    assert spec.sweep is not None
    return spec.project, spec.sweep.name


def _rule_of(spec: JobSpec) -> Rule:
    assert spec.sweep is not None
    validates = spec.validation.samples > 0
    return rule_of(spec.validation.every_steps if validates else None, spec.sweep.warmup_steps)
