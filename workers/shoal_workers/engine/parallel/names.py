"""Finds modules by the names that a ParallelPlan gives them; `*` stands for one part of a dotted name."""

from __future__ import annotations

from torch import nn


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Name and module of everything in `model` that `pattern` names, in the model's order."""
    desired = pattern.split(".")
    return [(name, module) for name, module in model.named_modules() if _fits(name.split("."), desired)]


def fits(name: str, pattern: str) -> bool:
    return _fits(name.split("."), pattern.split("."))


def _fits(parts: list[str], desired: list[str]) -> bool:
    return len(parts) == len(desired) and all(w in ("*", part) for part, w in zip(parts, desired, strict=True))
