"""Carries out the decisions of a scheduling policy in the store, from which drivers pass them on to supervisors.

Workers are given back before others get them, and all of it happens in one pass: the newcomer's supervisor starts while
the other group still switches to fewer workers, and Ray creates its workers as the resources come free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeAlias, assert_never

from shoal_service.collector import paused_collector
from shoal_service.control.market.build import named_cluster
from shoal_service.core.scheduling.decide import after
from shoal_service.core.scheduling.explaining import HeldBack, held_back
from shoal_service.core.scheduling.market import Decision, MarketState, Preempt, Resize, Start, Wait
from shoal_service.store import RequestConflict, Store, driving, queueing
from shoal_service.store.driving import DriveRow

Change: TypeAlias = Start | Resize | Preempt
_REFRESH_S = 10.0
"""Seconds after which expected starts are stored again if nothing else has changed: they change with every decision."""


class DecisionWriter:
    """Writes decisions to the store. Made by the control loop. Every method raises LeaseLost."""

    def __init__(self, store: Store, own: str = "") -> None:
        """`own`: the cluster in which a job starts if the policy names none."""
        self._store = store
        self._own = own
        self._written: object = None
        self._written_at = 0.0
        self._explained: object = None
        """The grants and the versions of the specs for which growth was explained last."""
        self._explained_at = 0.0
        """When growth was explained last."""

    async def write(self, changes: Sequence[Change], rows: Mapping[str, DriveRow], *, epoch: int, now: float) -> None:
        """Write the decisions, those that give workers back first."""
        for change in sorted(changes, key=lambda decision: _turn(decision, rows[decision.job_id])):
            try:
                await asyncio.to_thread(self._change, change, rows[change.job_id], epoch, now)
            except RequestConflict:
                pass  # paused or cancelled since the decision

    async def explain(
        self, state: MarketState, decisions: Sequence[Decision], rows: Mapping[str, DriveRow], *, epoch: int, now: float
    ) -> None:
        """Store why jobs wait, and why running ones get no more. Called after `write`, and after supervisors were
        informed: they must not wait for explanations."""
        await self._explain_waits([decision for decision in decisions if isinstance(decision, Wait)], epoch, now)
        await self._explain_growth(state, changes_of(decisions), rows, epoch, now)

    def _change(self, change: Change, row: DriveRow, epoch: int, now: float) -> None:
        match change:
            case Start(job_id, workers, reason, cluster, flows):
                where = cluster or named_cluster(row.spec) or self._own
                with self._store.write(epoch) as tx:
                    driving.begin_attempt(
                        tx, job_id, workers=workers, cluster=where, reason=reason, flows=flows, now=now
                    )
            case Resize(job_id, workers, reason, flows):
                with self._store.write(epoch) as tx:
                    driving.set_grant(tx, job_id, workers=workers, reason=reason, flows=flows, now=now)
            case Preempt(job_id, reason, beneficiary, flows):
                with self._store.write(epoch) as tx:
                    driving.preempt(tx, job_id, reason=reason, beneficiary=beneficiary, flows=flows, now=now)
            case _:
                assert_never(change)

    async def _explain_growth(
        self, state: MarketState, changes: Sequence[Change], rows: Mapping[str, DriveRow], epoch: int, now: float
    ) -> None:
        """Explains growth at once if the policy was asked about something new, otherwise now and then: the numbers in
        the words change with the progress of the jobs."""
        standing = {job.job_id: (job.granted, rows[job.job_id].spec_version) for job in state.jobs}
        if not changes and standing == self._explained and 0 <= now - self._explained_at < _REFRESH_S:
            return
        answers = await asyncio.to_thread(_held_back, state, changes, now)
        versions = {job.job_id: rows[job.job_id].spec_version for job in state.jobs}
        await asyncio.to_thread(self._store.writing(queueing.save_growth, epoch), answers, versions, now=now)
        self._explained, self._explained_at = standing, now

    async def _explain_waits(self, waits: Sequence[Wait], epoch: int, now: float) -> None:
        """Store the order of the queue, and why each job waits."""
        message = [(wait.job_id, wait.position, wait.reason, wait.holders) for wait in waits]
        if message != self._written or (waits and not 0 <= now - self._written_at < _REFRESH_S):
            is_whole = await asyncio.to_thread(self._write_places, waits, epoch, now)
            self._written, self._written_at = message if is_whole else None, now

    def _write_places(self, waits: Sequence[Wait], epoch: int, now: float) -> bool:
        """Write places in the queue. False: there are too many for one transaction, and the next call writes the
        rest."""
        with self._store.read() as tx:
            changes = queueing.differing(tx, waits, now=now)
        with self._store.write(epoch) as tx:
            queueing.save_places(tx, changes)
        return not changes.num_left


def changes_of(decisions: Sequence[Decision]) -> list[Change]:
    """The decisions that change something, without the jobs that wait."""
    return [decision for decision in decisions if not isinstance(decision, Wait)]


def _turn(change: Change, row: DriveRow) -> int:
    match change:
        case Preempt():
            return 0
        case Resize(_, workers, _):
            return 0 if workers < row.granted_workers else 2
        case Start():
            return 1
        case _:
            assert_never(change)


def _held_back(state: MarketState, changes: Sequence[Change], now: float) -> list[HeldBack]:
    with paused_collector():
        return held_back(after(state, changes, now), now)
