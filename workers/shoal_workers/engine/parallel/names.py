"""Finds modules by the patterns of a ParallelPlan; `*` matches one part of a dotted name.

Called by the axes when a model is built.
"""

from __future__ import annotations

from torch import nn


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Name and module of every module of `model` that `pattern` matches, in the model's order."""
    return [(name, module) for name, module in model.named_modules() if fits(name, pattern)]


def fits(name: str, pattern: str) -> bool:
    parts, expected = name.split("."), pattern.split(".")
    return len(parts) == len(expected) and all(name in ("*", part) for part, name in zip(parts, expected, strict=True))
