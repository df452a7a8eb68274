"""Which optimizers may run on local shards, because they update every element on its own: those of a table, and those
whose task promises it (`elementwise_optimizer`, docs/tasks.md). All others get the DTensors of sharded parameters.

Where parameters are whole, as in plain replicas, an optimizer need not be elementwise: what it keeps beside its state
is found while it trains (`Update`). Called by `build_update`.
"""

from __future__ import annotations

from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from shoal_workers.engine.step import own_optimizers
from shoal_workers.engine.step.added_state import AddedState
from shoal_workers.engine.step.own_optimizers import Lion

_ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RAdam, RMSprop, Rprop})
_WHOLE = frozenset({Adafactor, LBFGS, Muon, SparseAdam, own_optimizers.Adafactor, own_optimizers.MuonAndAdamW})
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def why_as_built(optimizer: Optimizer, *, is_split: bool) -> str:
    """Returns why an optimizer must stay as it was built, and its state where it is, for people; empty: it need not.

    Args:
        is_split: its parameters are DTensors.
    """
    if isinstance(optimizer, AddedState):  # what is added is elementwise
        return why_as_built(optimizer.inner, is_split=is_split)
    kind = type(optimizer)
    if "step" in vars(optimizer) or any(getattr(optimizer, name, None) for name in _HOOKS):
        return f"something is hooked into the step of this {kind.__name__}"
    if kind in _WHOLE:
        return f"the optimizer {kind.__name__} is not elementwise"
    if not is_split or kind in _ELEMENTWISE:
        return ""
    return (
        f"the optimizer {kind.__name__} is not known to be elementwise, and the parameters are sharded: if it updates "
        "each element on its own, set elementwise_optimizer = True in the task"
    )
