"""Errors whose text is made of their fields."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from string import Formatter

import shoal_workers.checkpoint.errors
import shoal_workers.snapshot_store.snapshot_errors  # noqa: F401
from shoal_workers.contract.base import FieldError


@dataclass(eq=False)
class Spilled(FieldError, text="{name!r} has lost {litres:.1f} l"):
    name: str
    litres: float = 0.5


def _below(base: type[FieldError]) -> set[type[FieldError]]:
    return {base}.union(*map(_below, base.__subclasses__()))


def test_the_text_is_filled_in_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(Spilled(name="{jug}")))
    assert str(error) == "'{jug}' has lost 0.5 l" and error.name == "{jug}"


def test_each_text_names_fields_of_its_class_only() -> None:
    with_text = [error for error in _below(FieldError) if error.text]
    assert len(with_text) > 30
    for error in with_text:
        names = {str(name).partition(".")[0] for _, name, *_ in Formatter().parse(error.text) if name is not None}
        assert names <= {field.name for field in fields(error)}, error  # type: ignore[arg-type]
