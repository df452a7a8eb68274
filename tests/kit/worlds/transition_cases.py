"""From which layout to which: every axis appears, disappears and changes its degree, alone and with others.

Each pair is tested by request (no step is lost) and by kill (a rank dies within a step), from memory and from disk.
`make test` runs the pairs in `sample`; `make test-all` runs all of them.
"""

from dataclasses import dataclass

from shoal_workers.contract.layout import ContextMethod, Layout, Recompute, Schedule, ShardLevel

STEPS = 4
SWITCH = 2
"""Steps made under the old layout."""


@dataclass(frozen=True)
class Transition:
    """One pair of layouts, and what makes the group change from one to the other."""

    model: str
    old: Layout
    new: Layout
    is_kill: bool
    victim: int
    """Rank that is killed."""
    phase: str
    """In which it is killed."""

    @property
    def name(self) -> str:
        cause = f"kill {self.victim} in {self.phase}" if self.is_kill else "request"
        return f"{self.model} {_name(self.old)} to {_name(self.new)} by {cause}"


def _name(layout: Layout) -> str:
    words = [layout.describe().replace(" ", "")]
    words += [layout.schedule.value, "-".join(map(str, layout.stages))] if layout.pp > 1 else []
    return " ".join(word for word in words if word)


def all_transitions() -> list[Transition]:
    return [
        Transition(model, old, new, is_kill, (turn + 1) % old.world_size, ("forward", "backward")[turn % 2])
        for model, pairs in (("dense", _DENSE), ("experts", _EXPERTS))
        for turn, (old, new) in enumerate(pairs)
        for is_kill in (False, True)
        if not (is_kill and old.world_size == 1)  # no rank would survive
    ]


def sample() -> list[Transition]:
    """One cause, by turns, for each 18th pair."""
    return [t for turn, t in enumerate(all_transitions()) if turn % 18 == 4]


_ONE = Layout()
_FSDP2, _FSDP3, _FSDP4, _FSDP5 = (Layout(dp_shard=degree) for degree in (2, 3, 4, 5))
_DP2, _DP3 = Layout(dp_replicate=2), Layout(dp_replicate=3)
_TP2, _TP3, _TP4 = (Layout(tp=degree) for degree in (2, 3, 4))
_CP2, _CP3 = Layout(cp=2), Layout(cp=3)
_ULYSSES = Layout(cp=2, context=ContextMethod.ULYSSES)
_HSDP = Layout(dp_replicate=2, dp_shard=2)
_GPIPE = Layout(pp=2, schedule=Schedule.GPIPE)
_UNEVEN = Layout(pp=2, stages=(1, 3))
_ZBV = Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))
_DUAL = Layout(pp=2, schedule=Schedule.DUAL_PIPE_V, stages=(1, 1, 1, 1))
_INTERLEAVED = Layout(pp=2, schedule=Schedule.INTERLEAVED, stages=(1, 1, 1, 1))
_PP3, _PP4 = Layout(pp=3, stages=(2, 1, 1)), Layout(pp=4)
_PP2_TP2 = Layout(pp=2, tp=2)
_DP2_TP2 = Layout(dp_replicate=2, tp=2)
_FSDP2_TP2 = Layout(dp_shard=2, tp=2)

_DENSE = (
    (_ONE, _FSDP2),
    (_FSDP2, _ONE),
    (_FSDP2, _FSDP3),
    (_FSDP4, _FSDP3),
    (_FSDP5, _FSDP4),
    (_FSDP3, _FSDP5),
    (_FSDP2, Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER, recompute=Recompute.FULL)),
    (Layout(dp_shard=3, shard=ShardLevel.GRADIENTS), _FSDP2),
    (_DP2, _ONE),
    (_ONE, _DP2),
    (_HSDP, _FSDP3),
    (_FSDP3, _HSDP),
    (_HSDP, _DP3),
    (_TP2, _ONE),
    (_ONE, _TP2),
    (_TP4, _TP3),
    (_TP2, _TP4),
    (_TP2, _FSDP2),
    (_FSDP2, _TP2),
    (_FSDP2_TP2, _FSDP3),
    (_FSDP3, _FSDP2_TP2),
    (Layout(dp_shard=3, tp=2), _FSDP2_TP2),
    (_DP2_TP2, _FSDP3),
    (_DP2_TP2, _FSDP2_TP2),
    (_CP2, _ONE),
    (_ONE, _CP2),
    (_ULYSSES, _FSDP3),
    (_CP3, Layout(cp=2, tp=2)),
    (Layout(dp_shard=2, cp=2), _CP3),
    (_UNEVEN, _ONE),
    (_ONE, _GPIPE),
    (_UNEVEN, Layout(pp=2, stages=(3, 1))),
    (_GPIPE, _ZBV),
    (_ZBV, _UNEVEN),
    (_INTERLEAVED, _DUAL),
    (_DUAL, _FSDP3),
    (_PP4, _PP3),
    (_PP3, _PP4),
    (_PP2_TP2, _FSDP3),
    (_FSDP3, _PP2_TP2),
    (_PP2_TP2, _PP3),
    (Layout(pp=2, dp_shard=2), _PP3),
    (Layout(pp=2, dp_replicate=2), _DP3),
    (Layout(pp=2, cp=2), _TP3),
    (Layout(pp=2, dp_shard=2, tp=2), Layout(pp=2, dp_replicate=2)),
    (_FSDP2_TP2, Layout(pp=2, dp_shard=2, tp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))),
    (Layout(dp_replicate=2, dp_shard=2, tp=2), Layout(pp=2, cp=2)),
)
_EP2, _EP3, _EP4 = (Layout(dp_shard=degree, ep=degree) for degree in (2, 3, 4))
_EP2_OF_4 = Layout(dp_shard=4, ep=2)
_EP2_TP2 = Layout(dp_shard=2, ep=2, tp=2)
_PP2_EP2 = Layout(pp=2, dp_shard=2, ep=2)
_HSDP_EP2 = Layout(dp_replicate=2, dp_shard=2, ep=2)
_EXPERTS = (
    (_ONE, _EP2),
    (_EP2, _ONE),
    (_EP2, _FSDP2),
    (_FSDP2, _EP2),
    (_EP4, _EP3),
    (_EP3, _EP2_OF_4),
    (_EP2_OF_4, _FSDP3),
    (_EP2_OF_4, _PP2_EP2),
    (_PP2_EP2, _PP3),
    (_PP3, _EP2_TP2),
    (_TP2, _EP2),
    (_EP2_TP2, _FSDP3),
    (_EP2_TP2, _TP2),
    (_HSDP_EP2, _EP4),
    (_HSDP_EP2, _TP3),
    (_ZBV, _EP3),
    (_EP3, _INTERLEAVED),
    (_CP2, _EP2),
    (Layout(dp_shard=2, cp=2, ep=2), _FSDP3),
    (_DP2_TP2, Layout(dp_shard=2, cp=2, ep=2)),
    (Layout(pp=2, dp_shard=2, ep=2, tp=2), Layout(dp_shard=2, cp=2, tp=2, ep=2)),
)
