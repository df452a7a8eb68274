"""Which jobs a list holds: conditions on labels (`LabelSelector`) and words to search for, as a user writes them.

The HTTP edge and the command line parse them, and the store makes SQL of them. A condition on a label has four forms:

| text | jobs |
|---|---|
| `NAME` | that have the label |
| `!NAME` | that do not have it |
| `NAME=VALUE` | whose label has this value |
| `NAME!=VALUE` | whose label has another value, and those without the label |
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.contract import is_job_name

MAX_SELECTORS = 8
"""Selectors in one question, at most."""
MAX_WORDS = 8
_MAX_VALUE = 255


class InvalidSelector(ValueError):
    """The text is none of the four forms."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"label {self.text[:80]!r}: use NAME, !NAME, NAME=VALUE or NAME!=VALUE."


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Selects jobs by one label: `matches` says whether a job with these labels is selected. The store asks the same in
    SQL."""

    name: str
    value: str | None = None
    """None means any."""
    negated: bool = False

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Raises InvalidSelector."""
        name, equals, value = text.partition("=")
        negated = name.endswith("!") if equals else name.startswith("!")
        name = (name[:-1] if equals else name[1:]) if negated else name
        if not is_job_name(name.strip()) or len(value) > _MAX_VALUE:
            raise InvalidSelector(text)
        return cls(name.strip(), value if equals else None, negated)

    def matches(self, labels: dict[str, str]) -> bool:
        is_equal = self.name in labels and (self.value is None or labels[self.name] == self.value)
        return is_equal is not self.negated


def search_words(text: str) -> tuple[str, ...]:
    """A job is found if it has every one of them, in its name, id, project, user or labels; the first MAX_WORDS."""
    return tuple(text.split()[:MAX_WORDS])
