"""ModelShape: parameters and buffers of a model, to tell whether new code can go on from the state of the old. Pure."""

from __future__ import annotations

from shoal_workers.contract.plain_text import OfTask

_NUM_NAMED = 3


class ModelShape(OfTask):
    """Tensors of the whole model, before it is split over ranks."""

    tensors: dict[str, str]
    """By name: type and size, for example "float32 [64, 12]"."""


def difference(trained: ModelShape, other: ModelShape) -> str:
    """In words, with the first tensors that differ; empty: none does."""
    found = [
        _words(name, trained.tensors.get(name), other.tensors.get(name))
        for name in {**trained.tensors, **other.tensors}
        if trained.tensors.get(name) != other.tensors.get(name)
    ]
    if not found:
        return ""
    more = f"; and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return f"its model does not fit the state of the one that trains: {'; '.join(found[:_NUM_NAMED])}{more}"


def _words(name: str, trained: str | None, other: str | None) -> str:
    if other is None:
        return f"{name} ({trained}) is gone"
    if trained is None:
        return f"{name} ({other}) is new"
    return f"{name} is {other} and was {trained}"
