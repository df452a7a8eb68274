"""The state of a run as flat names and tensors, which is what a checkpoint holds.

    model.<parameter or buffer>           DTensor or Tensor
    optim.<parameter>.<key>               DTensor or Tensor, for example optim.blocks.0.up.weight.exp_avg
    extra                                 small JSON: step, seed, loss scale, and the plain values of the optimizer

Names are the modules' own, so any world size can read what any other wrote. Nothing of it depends on a rank. Learning
rate and randomness are pure functions of step and seed, therefore these two are all that there is to keep of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_workers.engine.assembly import Assembly
from shoal_workers.engine.update import Update

_NOT_KEPT = ("params", "lr", "initial_lr", "foreach", "fused")
_PLAIN = (bool, int, float, str, type(None))


def tensors_of(assembly: Assembly, update: Update) -> dict[str, Tensor]:
    """Every tensor of the run that this rank has a part of, by name; they share the live ones' memory. Tied weights
    appear once."""
    tensors = {f"model.{name}": value.detach() for name, value in assembly.named_tensors()}
    for name, key, entry in update.state():
        if isinstance(entry, Tensor):
            tensors[f"optim.{name}.{key}"] = entry.detach()
    return tensors


def extra_of(
    update: Update,
    *,
    step: int,
    seed: int,
    reports: list[dict[str, Any]],
    loss_scale: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What is not a tensor, ready for JSON. `reports`: of the last steps, see recent.py; `loss_scale`: scaling.py."""
    values = update.plain_values()
    for key, value in values.items():
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"optimizer state {key!r} is {type(value).__name__}; only tensors and plain values are kept."
            )
    groups = [
        {key: value for key, value in group.items() if key not in _NOT_KEPT and isinstance(value, _PLAIN)}
        for group in update.optimizer.param_groups
    ]
    extra = {"step": step, "seed": seed, "optimizer_values": values, "param_groups": groups, "reports": reports}
    return extra if loss_scale is None else {**extra, "loss_scale": loss_scale}


def apply_extra(extra: dict[str, Any], update: Update) -> int:
    """Put the plain values back after the tensors have been read; returns the step."""
    update.put_back(extra.get("optimizer_values", {}))
    for group, saved in zip(update.optimizer.param_groups, extra.get("param_groups", ()), strict=False):
        group.update(saved)
    return int(extra["step"])
