"""Proofs of layouts: a proof runs two steps whole and split, and compares the models that they train.

Pure data. The engine makes them (engine/proof), the supervisor keeps them, `shoal check` and the status show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.plain_text import OfTask


class ProofOutcome(StrEnum):
    """The result of a proof."""

    PROVEN = "proven"
    """Loss, metrics, gradients, parameters and buffers equal those of the whole model, also after a restore."""
    REFUSED = "refused"
    """One of them differs, or the split model cannot compute them."""
    UNPROVEN = "unproven"
    """The proof could not run; `words` says why."""


class LayoutProof(OfTask):
    """What a proof of one layout has shown."""

    layout: Layout
    outcome: ProofOutcome
    words: str = ""
    """One sentence for users; if the data axes are proven, a remark on a metric."""
    module: str = ""
    """If refused, the first module whose output differs, else the module of a parameter whose gradient differs."""
    difference: float = 0.0
    """The largest relative difference of a parameter or its gradient; if refused, that of the named module."""
    seconds: float = 0.0
    """Seconds that the proof took."""
    is_cached: bool = False
    """True if an earlier proof of the same task and plan is reused."""
    shrunk: str = ""
    """How the model was made smaller for the proof; empty if it was not."""


def find_proof(layout: Layout, proofs: Iterable[LayoutProof]) -> LayoutProof | None:
    """Return a proof whose layout has all features of `layout`; None if `layout` has to be proven."""
    features, proven = layout.features, (proof for proof in proofs if proof.outcome is ProofOutcome.PROVEN)
    return next((proof for proof in proven if features <= proof.layout.features), None)


def is_refused(layout: Layout, refused: Iterable[Layout]) -> bool:
    """Return True if `layout` has all features of a refused layout."""
    features = layout.features
    return any(other.features <= features for other in refused)
