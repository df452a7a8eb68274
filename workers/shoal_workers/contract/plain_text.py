"""Text of a task made plain: no half of a surrogate pair (UTF-8 has none), no NUL (PostgreSQL stores none). Pure.

A line of its output is shown on terminals, so it also has no escape sequence and no control character.

A name that is not UTF-8 comes from `os.listdir` with such halves, and goes into an exception, a metric, a log line.
Each is replaced by its escape, as Python's own stderr shows it: `caf\\udce9.txt`. Messages of a worker that can hold
text of its task are made plain when they are made, the journal and the database when they write.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError, model_validator

from shoal_workers.contract.base import Frozen

_ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor, clearing
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]"
)
"""Escape sequences of ECMA-48, and those that xterm adds."""
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""All control characters but the tabulator, and characters that reorder or end a line of text."""
_MAX_PROBLEM = 2_000


def plain_line(text: str) -> str:
    """A line as a terminal may show it: escape sequences are removed, other control characters shown as escapes."""
    text = _ESCAPE_SEQUENCE.sub("", text)
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def plain_text(text: str) -> str:
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """`value` with all text in it made plain, also in keys of dicts. Objects of other types are not changed."""
    match value:
        case str():
            return plain_text(value) if type(value) is str else value
        case dict():
            return {plain(key): plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(plain(item) for item in value)
        case _:
            return value


def text_of(error: BaseException) -> str:
    """Text of an exception; a sentence of Shoal's if the exception's own `__str__` raises."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be made: __str__ of {type(error).__qualname__} raises {type(other).__qualname__})"


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a document: its path, and what is wrong with the value; 2,000 letters at most."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, problem["loc"])), message)))[:_MAX_PROBLEM]


class OfTask(Frozen):
    """A message that can hold text of a task. The text is made plain when the message is made."""

    @model_validator(mode="before")
    @classmethod
    def _made_plain(cls, values: Any) -> Any:
        return plain(values)
