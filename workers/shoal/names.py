"""Which of the numbers that a library logs are the loss, the learning rate and the gradient norm. Pure.

    loss, train/loss, train_loss, Loss/train     the loss: the first of them in this order, else another one with `loss`
    lr, learning_rate, lr-AdamW                  the learning rate
    grad_norm                                    the gradient norm
    eval_loss, val/loss ...                      metrics of their own, as everything else
    train_runtime, ..._per_second                left out: they are about speed, of which Shoal has its own

Imports the standard library only. Used by the trackers of this package, and by the worker, which reads TensorBoard
event files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_EVALUATION = frozenset({"eval", "evaluation", "val", "valid", "validation", "test", "dev"})
_USUAL = ("loss", "train_loss", "loss_train", "training_loss", "train_loss_step")
_SUMMARY = frozenset({"train_runtime", "train_train_loss", "train_train_runtime"})
"""What the Hugging Face Trainer says of the whole training, at its end."""
_SPEED = ("runtime", "per_second", "total_flos")
_MAX_CHARS = 40


def sorted_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values of `loss`, `lr` and `grad_norm`, as far as they are there, and the others with names that a metric
    may have."""
    loss = _loss_name(values)
    known: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        message = _words(name)
        spelled = "_".join(message)
        if spelled in _SUMMARY or spelled.endswith(_SPEED):
            continue
        if name == loss:
            known["loss"] = value
        elif is_evaluation(name):
            others[metric_name(name)] = value
        elif "lr" not in known and (
            message[:1] == ["lr"] or message[-1:] == ["lr"] or message[-2:] == ["learning", "rate"]
        ):
            known["lr"] = value
        elif message[-2:] == ["grad", "norm"]:
            known["grad_norm"] = value
        else:
            others[metric_name(name)] = value
    return known, {name: value for name, value in others.items() if name}


def is_evaluation(name: str) -> bool:
    """Return whether the value is of an evaluation, not of training."""
    return not _EVALUATION.isdisjoint(_words(name))


def metric_name(name: str) -> str:
    """Return the name, as that of a metric of Shoal; empty: nothing is left of it."""
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", name).lstrip("0123456789_./-")[:_MAX_CHARS]


def _loss_name(names: Mapping[str, Any]) -> str | None:
    """Return the name of the loss of training; None if there is none."""
    fitting = [name for name in names if "loss" in _words(name) and not is_evaluation(name)]
    fitting = [name for name in fitting if "_".join(_words(name)) not in _SUMMARY]
    return min(fitting, key=_strangeness, default=None)


def _strangeness(name: str) -> int:
    spelled = "_".join(_words(name))
    return _USUAL.index(spelled) if spelled in _USUAL else len(_USUAL)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
