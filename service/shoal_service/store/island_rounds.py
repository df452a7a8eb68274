"""The ledger of islands: what has arrived for each round, and which islands it was closed with.

Rows belong to the job of island 0, and go with it. A row of a round that is closed never changes. The history of each
job whose island trains and is not a member gets an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row, select, update

from shoal_service.core.events import IslandMissedRound
from shoal_service.core.islands import Contribution
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.fleet_views import IslandArrival, IslandRound
from shoal_service.store import driving
from shoal_service.store.checkpoint_rows import read_committed
from shoal_service.store.database import (
    NEWEST_SPEC,
    Transaction,
    in_states,
    island_rounds,
    job_specs,
    jobs,
    json_text,
    upsert,
)
from shoal_service.store.errors import RequestConflict
from shoal_service.store.records import JobRecord, read_job_num, read_spec_text
from shoal_workers.contract import JobSpec, JobState
from shoal_workers.contract.checks.spec_errors import SpecError
from shoal_workers.contract.islands import IslandsSpec, RoundDecision

_ARRIVALS = TypeAdapter(tuple[IslandArrival, ...])
_MAX_TURNS = 100
_NOT_ENDED = frozenset(state for state in JobState if not state.ended)


def check_joins(tx: Transaction, run: str, spec: JobSpec) -> None:
    """Check that a new job may train an island of a run: one of its project, with as many islands, of which no other
    job trains this one. Raises SpecError."""
    assert spec.islands is not None
    index = spec.islands.index
    query = select(job_specs.c.document).join(jobs, jobs.c.num == job_specs.c.job_num)
    document = tx.execute(
        query.where(
            jobs.c.id == run,
            jobs.c.project == spec.project,
            job_specs.c.version == jobs.c.spec_version,
            ~jobs.c.deleting,
        )
    ).scalar_one_or_none()
    first = None if document is None else read_spec_text(document).value.islands
    if first is None or first.run != run:
        raise SpecError.at(
            "islands.run",
            f"islands.run {run}: project {spec.project} has no job of an island 0 with this id. Leave islands.run out "
            "to begin with island 0, or submit all islands with `shoal submit`.",
        )
    if first.num != spec.islands.num:
        raise SpecError.at("islands.num", f"islands.num {spec.islands.num}: the islands of {run} are {first.num}.")
    for job_id, island in _list_islands(tx, run, _NOT_ENDED):
        if island == index:
            raise SpecError.at(
                "islands.index",
                f"islands.index {index}: {job_id} trains this island and has not ended. Cancel it first, or leave "
                "islands.run out to begin other islands.",
            )

    if (kept := _first_kept(tx, run, first, frozenset(JobState))) > 0:
        raise SpecError.at(
            "islands.run",
            f"islands.run {run}: an island that joins takes all earlier rounds, and the differences of those before "
            f"round {kept} are deleted. Begin other islands: leave islands.run out, and set init_from to an export of "
            "the newest checkpoint.",
        )


def check_reopens(tx: Transaction, job: JobRecord, spec: JobSpec) -> None:
    """Check that the rounds are there that a job needs to go on with its island. Raises RequestConflict."""
    if spec.islands is None or spec.islands.run in (None, job.id):
        return
    run, island = spec.islands.run, spec.islands.index
    assert run is not None and island is not None
    kept = first_needed(tx, run, spec.islands)
    problem = ""
    if tx.execute(select(jobs.c.id).where(jobs.c.id == run, ~jobs.c.deleting)).scalar_one_or_none() is None:
        problem = f"{run}, the job of island 0, is deleted with all rounds"
    elif (needed := _first_round(tx, _read_ledger(tx, run, spec.islands), job.id, island, max)) < kept:
        problem = f"it needs the rounds from {needed} on, and those before {kept} are deleted"
    if problem:
        way_out = "Begin other islands: leave islands.run out, and set init_from to an export of the newest checkpoint"
        raise RequestConflict(job.id, job.state, f"go on: {problem}. {way_out}")


def rounds(tx: Transaction, run: str, *, limit: int = _MAX_TURNS) -> tuple[IslandRound, ...]:
    """Read the newest rounds of a run, the newest first; none if it is deleted."""
    query = select(island_rounds).join(jobs, jobs.c.num == island_rounds.c.job_num).where(jobs.c.id == run)
    rows = tx.execute(query.order_by(island_rounds.c.round.desc()).limit(limit)).all()
    return tuple(_round(row) for row in rows)


def _round(row: Row[*tuple[Any, ...]]) -> IslandRound:
    arrived = _ARRIVALS.validate_json(row.contributions)
    decision = RoundDecision.model_validate_json(row.decision) if row.decision else None
    members = decision.members if decision is not None else ()
    losses = {arrival.island: arrival.loss for arrival in arrived if arrival.loss is not None}
    is_known = bool(members) and losses.keys() >= {member.island for member in members}
    mean = sum(member.weight * losses[member.island] for member in members) if is_known else None
    return IslandRound(round=row.round, arrived=arrived, decision=decision, closed_at=row.closed_at, loss=mean)


def newest_decision(tx: Transaction, run: str, topology: str = "all") -> RoundDecision | None:
    """Read the newest decision of a run; None if there is none, and if the run is deleted.

    Rounds of all close in the order of their numbers, whatever the clock says; those of pairs do not.
    """
    query = select(island_rounds.c.decision).join(jobs, jobs.c.num == island_rounds.c.job_num)
    query = query.where(jobs.c.id == run, island_rounds.c.closed_at.is_not(None))
    closed_first = [island_rounds.c.closed_at.desc()] if topology == "pairs" else []
    decision = tx.execute(query.order_by(*closed_first, island_rounds.c.round.desc()).limit(1)).scalar()
    return None if decision is None else RoundDecision.model_validate_json(decision)


def closed(tx: Transaction, run: str, *, since: int) -> set[int]:
    """Return the rounds that are closed, from a number on."""
    query = select(island_rounds.c.round).join(jobs, jobs.c.num == island_rounds.c.job_num)
    where = (jobs.c.id == run) & (island_rounds.c.round >= since) & island_rounds.c.closed_at.is_not(None)
    return {*tx.execute(query.where(where)).scalars()}


def note(
    tx: Transaction, run: str, number: int, contributions: Sequence[Contribution], *, now: float
) -> dict[Contribution, float]:
    """Note what has arrived for an open round. Of each island the first stays; a closed round stays as it is.

    Return all that has arrived, with the times at which it was first seen. Raises JobNotFound.
    """
    num = read_job_num(tx, run, lock=True)
    where = (island_rounds.c.job_num == num) & (island_rounds.c.round == number)
    known = tx.execute(select(island_rounds.c.contributions, island_rounds.c.decision).where(where)).one_or_none()
    text, decision = known or ("[]", "")
    arrived = {arrival.island: arrival for arrival in _ARRIVALS.validate_json(text)}
    new = [sent for sent in contributions if sent.island not in arrived and not decision]
    arrived |= {contribution.island: IslandArrival(**dict(contribution), arrived_at=now) for contribution in new}
    if new:
        text = _ARRIVALS.dump_json(tuple(arrived.values())).decode()
        upsert(tx, island_rounds, [{"job_num": num, "round": number, "contributions": text, "decision": ""}])
    return {
        Contribution(**arrival.model_dump(exclude={"arrived_at"})): arrival.arrived_at for arrival in arrived.values()
    }


def close(tx: Transaction, run: str, decision: RoundDecision, *, now: float) -> None:
    """Close a round, and note it in the jobs of its islands that train and missed it. A closed round stays as it is.

    Raises JobNotFound.
    """
    num = read_job_num(tx, run, lock=True)
    where = (island_rounds.c.job_num == num) & (island_rounds.c.round == decision.round)
    values = {"decision": decision.model_dump_json(), "closed_at": now}
    if not tx.execute(update(island_rounds).where(where & (island_rounds.c.decision == "")).values(values)).rowcount:
        return
    members = tuple(member.island for member in decision.members)
    for job_id, island in _list_islands(tx, run, ATTEMPT_STATES):
        if island in decision.absent:
            event = IslandMissedRound(round=decision.round, island=island, members=members)
            driving.record_event(tx, job_id, event, now=now)
    tx.publish(run)


def find_training(tx: Transaction, run: str) -> tuple[str, ...]:
    """Find the jobs of a run that have not ended."""
    return tuple(job_id for job_id, _ in _list_islands(tx, run, _NOT_ENDED))


def first_needed(tx: Transaction, run: str, spec: IslandsSpec) -> int:
    """Return the first round that an island may have to take if it goes back to its oldest checkpoint; 0 if one has no
    checkpoint."""
    return _first_kept(tx, run, spec, frozenset(JobState) - {JobState.SUCCEEDED, JobState.CANCELLED})


def _first_kept(tx: Transaction, run: str, spec: IslandsSpec, states: Collection[JobState]) -> int:
    ledger = _read_ledger(tx, run, spec)
    needed = (_first_round(tx, ledger, job_id, island, min) for job_id, island in _list_islands(tx, run, states))
    return min(needed, default=0)


def _read_ledger(tx: Transaction, run: str, spec: IslandsSpec) -> tuple[IslandRound, ...]:
    return rounds(tx, run, limit=_MAX_TURNS * spec.num_at_once)


def _first_round(
    tx: Transaction, ledger: Sequence[IslandRound], job_id: str, island: int, choose: Callable[[list[int]], int]
) -> int:
    """Return the first round that an island takes after its oldest (min) or newest (max) checkpoint."""
    step = choose([name.step for name in read_committed(tx, job_id)] or [0])
    # A round that was sent to before the checkpoint may not have landed by then.
    sent = ((row.round, arrival) for row in ledger for arrival in row.arrived if arrival.island == island)
    return max((number for number, arrival in sent if arrival.step < step), default=0)


def _list_islands(tx: Transaction, run: str, states: Collection[JobState]) -> list[tuple[str, int]]:
    """Find the jobs of a run that are in one of the states, with their islands."""
    spec = job_specs.c.document
    rows = tx.execute(
        select(jobs.c.id, json_text(tx, spec, "islands", "index"))
        .join(job_specs, NEWEST_SPEC)
        .where(in_states(states))
        .where(json_text(tx, spec, "islands", "run") == run)
        .order_by(jobs.c.num)
    )
    return [(job_id, int(index)) for job_id, index in rows]
