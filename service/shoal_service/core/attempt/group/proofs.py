"""Proofs of layouts: what a group must prove, what it has proven, and what follows if its layout is refused.

    first group of a fixed layout     refused: the job ends with that sentence
    otherwise                         refused: the next group gets a layout that does not use all of the same axes

Called by `forming`, `reports` and `follow_up`. The proof itself is the engine's (shoal_workers/engine/proof).
"""

from __future__ import annotations

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.generations import LayoutProven, LayoutRefused
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ProofDemand
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome, axes_of, proof_for
from shoal_workers.contract.spec import ParallelismSpec


def demanded(state: Attempt, layout: Layout) -> ProofDemand:
    """Which proof the next group needs. The data axes need no plan, so they need no proof."""
    if not axes_of(layout) or proof_for(layout, state.history.proofs) is not None:
        return ProofDemand.NONE
    if not isinstance(state.target.spec.parallelism, ParallelismSpec):
        return ProofDemand.REQUIRED
    return ProofDemand.IF_POSSIBLE


def arrived(turn: Turn, proof: LayoutProof | None) -> None:
    """The group has formed: its layout is used."""
    if proof is None:
        return
    turn.history = turn.history.with_proof(proof)
    turn.emit(
        LayoutProven(
            layout=proof.layout.describe(),
            outcome=proof.outcome,
            difference=proof.difference,
            seconds=proof.seconds,
            cached=proof.is_cached,
            message=proof.words,
        )
    )


def refused(turn: Turn, message: str) -> bool:
    """The group has refused its layout. Whether another group may follow; else the job ends."""
    layout = turn.group.layout
    assert layout is not None, "a group has a layout"
    turn.history = turn.history.with_proof(LayoutProof(layout=layout, outcome=ProofOutcome.REFUSED, words=message))
    turn.emit(LayoutRefused(layout=layout.describe(), message=message))
    is_fixed = isinstance(turn.group.planned_by, ParallelismSpec)
    return turn.history.has_formed or not is_fixed
