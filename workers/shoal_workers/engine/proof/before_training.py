"""The proof of a generation's layout, before its model is built. Called by the engine on all ranks.

rank 0 knows it already      the others learn it, and nothing is computed
otherwise                    `prove`, and rank 0 remembers what it has found
"""

from __future__ import annotations

import gc

from shoal_workers.contract.messages import ProofDemand
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.engine.errors import LayoutRefused
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.proof import remembered
from shoal_workers.engine.proof.prove import prove
from shoal_workers.engine.step.generation import Generation


def proof_of(generation: Generation, group: Group) -> LayoutProof | None:
    """None: nothing was demanded.

    Raises:
        LayoutRefused: the layout trains another model; or it could not be proven, and must be.
        TaskFailed: the task's own code raised.
    """
    demand = generation.assignment.proof
    if demand is ProofDemand.NONE:
        return None
    generation.position.note(f"proving the layout {generation.layout.describe()}")
    known = remembered.find(generation.spec, generation.layout) if generation.rank == 0 else None
    text = group.decide("proof", known.model_dump_json() if known else "", lambda texts: texts[0])
    if text:
        proof = LayoutProof.model_validate_json(text)
    else:
        try:
            proof = prove(generation)
        except LayoutRefused as refused:
            proof = refused.proof
        gc.collect()  # the copies refer to the group, which must not outlive its generation
        if generation.rank == 0:
            remembered.keep(generation.spec, proof)
    if proof.outcome is ProofOutcome.REFUSED:
        raise LayoutRefused(proof)
    if proof.outcome is ProofOutcome.UNPROVEN:
        words = f"the layout {generation.layout.describe()} was not proven: {proof.words}"
        if demand is ProofDemand.REQUIRED:
            raise LayoutRefused(proof.model_copy(update={"words": words}))
        if generation.rank == 0:
            generation.outbox.log_text(f"{words}. It is used because the spec fixes it.")
    return proof
