"""Text of a task made plain: no half of a surrogate pair (UTF-8 has none), no NUL (PostgreSQL stores none). Pure.

A name that is not UTF-8 comes from `os.listdir` with such halves, and goes into an exception, a metric, a log line.
Each is replaced by its escape, as Python's own stderr shows it: `caf\\udce9.txt`. Messages of a worker that can hold
text of its task are made plain when they are made, the journal and the database when they write.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from shoal_workers.contract.base import Frozen


def plain_text(text: str) -> str:
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """The same with all text in it, also in keys. Values that are not made of dicts, lists and tuples stay."""
    match value:
        case str():
            return plain_text(value) if type(value) is str else value
        case dict():
            return {plain(key): plain(one) for key, one in value.items()}
        case list():
            return [plain(one) for one in value]
        case tuple() if type(value) is tuple:
            return tuple(plain(one) for one in value)
        case _:
            return value


def text_of(error: BaseException) -> str:
    """What it says; in words of ours if its own `__str__` raises."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be made: __str__ of {type(error).__qualname__} raises {type(other).__qualname__})"


class OfTask(Frozen):
    """A message that can hold text of a task."""

    @model_validator(mode="before")
    @classmethod
    def _made_plain(cls, values: Any) -> Any:
        return plain(values)
