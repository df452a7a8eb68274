"""What has happened to the attempt so far, across its groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_workers.contract.course.best import Standing
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTime:
    layout: Layout
    step_s: float | None
    """Median seconds of a step; None: the group was lost before it was known, so this level is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    has_formed: bool = False
    """A group has formed at least once."""
    total_steps: int | None = None
    """Of the whole training run; None until a group has formed."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are left out, since a rollback was made because of them."""
    standing: Standing | None = None
    """What the validations of the job have shown; None: there was none."""
    proofs: tuple[LayoutProof, ...] = ()
    """The newest proof of each kind of layout: proven, refused, or not proven."""
    level_times: tuple[LevelTime, ...] = ()
    """What steps of layouts take that differ in the shard level only."""
    trying: Layout | None = None
    """The one that is being measured, or is about to be."""
    num_incidents: int = 0
    steps_lost: int = 0

    @property
    def refused_layouts(self) -> tuple[Layout, ...]:
        """No layout that uses all that one of them uses is planned."""
        return tuple(proof.layout for proof in self.proofs if proof.outcome is ProofOutcome.REFUSED)

    def with_proof(self, proof: LayoutProof) -> History:
        kind = kind_of(proof.layout)
        others = tuple(one for one in self.proofs if kind_of(one.layout) != kind)
        return replace(self, proofs=(*others, proof))
