"""What is known of a layout: whether two steps that are split as it says train the same model as a plain loop.

Pure data. Made by the engine (engine/proof), kept by the supervisor, shown by `shoal check` and in the status.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from shoal_workers.contract.layout import ContextMethod, Layout, Schedule, ShardLevel
from shoal_workers.contract.plain_text import OfTask


class ProofOutcome(StrEnum):
    """What a proof has found."""

    PROVEN = "proven"
    """Loss, metrics, every gradient, parameter and buffer are those of the whole model, also after a restore."""
    REFUSED = "refused"
    """One of them differs, or the split model cannot compute them."""
    UNPROVEN = "unproven"
    """It could not be determined; `words` says why."""


class LayoutProof(OfTask):
    """Two steps, whole against split."""

    layout: Layout
    outcome: ProofOutcome
    words: str = ""
    """One sentence for people; of what is proven on the data axes, a remark on a metric."""
    module: str = ""
    """Refused: the first module whose output differs, else that of a parameter whose gradient does."""
    difference: float = 0.0
    """The largest relative difference of a parameter or its gradient; of what is refused, that of what is named."""
    seconds: float = 0.0
    """Seconds that the proof took."""
    is_cached: bool = False
    """It was found earlier, for the same task and plan."""
    shrunk: str = ""
    """How the model was made smaller for the proof; empty: it was not."""


def kind_of(layout: Layout) -> frozenset[str]:
    """What a proof of `layout` is about: the axes of the plan that are in use, and how they are computed.

    Degrees are no part of it: what is wrong with tp 2 is wrong with tp 4, and sizes that a degree must divide are
    checked elsewhere."""
    kind = set(layout.planned_axes)
    if layout.pp > 1:
        kind.add(_SCHEDULES[layout.schedule])
    if layout.cp > 1 and layout.context is not ContextMethod.ALL_GATHER:
        kind.add(f"context {layout.context}")
    if layout.shard is ShardLevel.NONE:
        kind.add(PLAIN)
    return frozenset(kind)


PLAIN = "whole state"
"""Its kind also when nothing is split: `engine/model/whole_state.py` refuses it where the whole does not fit."""


_SCHEDULES = {
    Schedule.GPIPE: "one stage a rank",
    Schedule.ONE_F_ONE_B: "one stage a rank",
    Schedule.INTERLEAVED: "several stages a rank",
    Schedule.ZERO_BUBBLE_V: "both ends on a rank",
    Schedule.DUAL_PIPE_V: "both ends on a rank",
}
"""Which stages each schedule puts on one rank, the only difference between schedules that matters for a proof."""


def proof_for(layout: Layout, proofs: Iterable[LayoutProof]) -> LayoutProof | None:
    """A proof that covers `layout`, since its own layout uses all that `layout` uses; None if `layout` must be
    proven."""
    kind = kind_of(layout)
    return next(
        (proof for proof in proofs if proof.outcome is ProofOutcome.PROVEN and kind <= kind_of(proof.layout)), None
    )


def is_refused(layout: Layout, refused: Iterable[Layout]) -> bool:
    """Return whether `layout` uses all that one of the refused layouts uses."""
    kind = kind_of(layout)
    return any(kind_of(other) <= kind for other in refused)
