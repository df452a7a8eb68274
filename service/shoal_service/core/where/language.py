"""Parses the language in which users select and order jobs into a condition, a value that the store turns into SQL.

    or        : and ("or" and)*                     also ||, && and !
    and       : not ("and" not)*
    not       : "not" not | "(" or ")" | comparison
    comparison: NAME                                the job has it, and it is not false
              | NAME (== | != | < | <= | > | >=) literal
              | NAME (~ | contains) "text"          holds the text, in upper or lower case
              | NAME ["not"] in (literal, ...)
                instead of NAME also max(loss), min(loss), first(step where loss is nan)
    literal   : "text" | 'text' | 1e-3 | 7d | true | false | null | now | now - 7d | 2026-11-20 | 2026-11-20T08:00Z

A job without a value matches no comparison but `!=` and `== null`: `!=` is the opposite of `==`, and `not` of what
follows. Text and numbers never equal each other, except that a label that reads as a number compares with numbers.
Durations (s, m, h, d, w) are numbers of seconds; a date without a zone is UTC. No text is evaluated: `parse` knows
these forms and no other. Errors name the place with a caret, and what may stand there.

A list also takes words to search for, and conditions on labels (`LabelSelector`) in four forms:

| text | jobs |
|---|---|
| `NAME` | that have the label |
| `!NAME` | that do not have it |
| `NAME=VALUE` | whose label has this value |
| `NAME!=VALUE` | whose label has another value, and those without the label |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias

from shoal_service.core.where.fields import Field, Kind, Source, UnknownName, field_named, series_field
from shoal_workers.contract import JobState, is_job_name

MAX_LENGTH = 2000
"""Letters of a condition, at most."""
MAX_SORTED = 4
MAX_COLUMNS = 40
_MAX_COMPARISONS = 64
_MAX_DEPTH = 40
_SHOWN = 72
"""Letters of the text around a mistake that its message shows."""
Literal: TypeAlias = str | float | bool | None


class Relation(StrEnum):
    """How a value is compared. `!=` is the opposite of `==`."""

    EQUAL = "=="
    LESS = "<"
    AT_MOST = "<="
    MORE = ">"
    AT_LEAST = ">="
    CONTAINS = "~"


@dataclass(frozen=True, slots=True)
class Compared:
    """The value stands in this relation to the literal. None with `==`: there is no value."""

    field: Field
    relation: Relation
    literal: Literal


@dataclass(frozen=True, slots=True)
class IsSet:
    """There is a value, and it is not false."""

    field: Field


@dataclass(frozen=True, slots=True)
class Not:
    """The condition does not hold."""

    part: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part holds."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of the parts holds, or several."""

    parts: tuple[Condition, ...]


Condition: TypeAlias = Compared | IsSet | Not | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class Order:
    """What a list is ordered by. Jobs without the value come last, in both directions."""

    field: Field
    descending: bool


@dataclass(eq=False)
class InvalidCondition(ValueError):
    """The text is not of the language."""

    text: str
    at: int
    """Index of the first letter of the mistake."""
    length: int
    message: str

    def __str__(self) -> str:
        start = max(0, min(self.at - _SHOWN // 2, len(self.text) - _SHOWN))
        shown = self.text[start : start + _SHOWN]
        shown = re.sub(r"\s", " ", shown)
        marks = "^" * max(1, min(self.length, _SHOWN - (self.at - start)))
        return f"{self.message}\n  {shown}\n  {' ' * (self.at - start)}{marks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a list of jobs holds, in which order, and with which further values."""

    where: Condition | None = None
    """None means all jobs."""
    order: tuple[Order, ...] = ()
    """Empty: the order that the list has anyway."""
    columns: tuple[Field, ...] = ()
    """Fields whose values each entry has."""
    with_archived: bool = False
    """True if archived jobs are in it, if `where` does not say which of them."""

    @classmethod
    def parse(
        cls, where: str = "", sort: str = "", columns: str = "", *, with_archived: bool = False, now: float
    ) -> Selection:
        """Raises InvalidCondition."""
        return cls(
            where=parse(where, now),
            order=parse_order(sort),
            columns=parse_columns(columns),
            with_archived=with_archived,
        )

    @property
    def hides_archived(self) -> bool:
        return not self.with_archived and all(field.source is not Source.ARCHIVED for field in fields_of(self.where))


def parse(text: str, now: float) -> Condition | None:
    """Parses a condition; None if the text is empty, so all jobs match. `now`: seconds since 1970.
    Raises InvalidCondition."""
    if len(text) > MAX_LENGTH:
        raise InvalidCondition(text, MAX_LENGTH, 1, f"the condition has more than {MAX_LENGTH} letters")
    for at, letter in enumerate(text):
        if not (letter.isprintable() or letter in "\n\r\t"):
            raise InvalidCondition(text.replace(letter, " "), at, 1, f"{letter!r} has no meaning here")
    reader = _Reader(text, now)
    if reader.token.is_end():
        return None
    condition = reader.any_of(0)
    if not reader.token.is_end():
        raise reader.wrong("expected `and`, `or`, or the end")
    return condition


def parse_order(text: str) -> tuple[Order, ...]:
    """Parses names that are separated by commas; a dash before a name: the largest first. Raises InvalidCondition."""
    orders = [Order(_field_at(text, at, name.removeprefix("-")), name.startswith("-")) for at, name in _separated(text)]
    if len(orders) > MAX_SORTED:
        raise InvalidCondition(text, 0, len(text), f"a list is ordered by {MAX_SORTED} names at most")
    return tuple(orders)


def parse_columns(text: str) -> tuple[Field, ...]:
    """Parses names that are separated by commas. Raises InvalidCondition."""
    columns = [_field_at(text, at, name) for at, name in _separated(text)]
    if len(columns) > MAX_COLUMNS:
        raise InvalidCondition(text, 0, len(text), f"a table has {MAX_COLUMNS} columns at most")
    return tuple(dict.fromkeys(columns))


def fields_of(condition: Condition | None) -> Iterator[Field]:
    """Yields the fields that the condition names."""
    match condition:
        case Compared(field) | IsSet(field):
            yield field
        case Not(part):
            yield from fields_of(part)
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from fields_of(part)


LABEL_NUMBER = r"^-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?$"
"""A label that reads as a number, of a length that both databases convert without an error."""


def _separated(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    for part in text.split(",") if text.strip() else ():
        yield at + len(part) - len(part.lstrip()), part.strip()
        at += len(part) + 1


def _field_at(text: str, at: int, name: str) -> Field:
    if _NAME.fullmatch(name) is None and _OVER_STEPS.fullmatch(name) is None:
        raise InvalidCondition(text, at, len(name), f"{name[:80]!r} is not a name, such as loss or optimizer.lr")
    over_steps = _OVER_STEPS.fullmatch(name)
    try:
        if over_steps is None:
            return field_named(tuple(part.strip('"') for part in re.findall(r'"[^"]+"|[^.]+', name)))
        function = over_steps["function"] or "first"
        return series_field(name, function.lower(), over_steps["column"] or over_steps["nan"])
    except UnknownName as error:
        raise InvalidCondition(text, at, len(name), error.message) from None


class _TokenKind(StrEnum):
    """The kinds of tokens. The order is that in which they are tried."""

    DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?"
    NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[A-Za-z_]*"
    TEXT = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
    MARK = r"==|!=|<=|>=|&&|\|\||[=<>~()\[\],!+-]"
    OVER_STEPS = (
        r"(?i:(?P<function>max|min)\(\s*(?P<column>\w+)\s*\)|first\(\s*step\s+where\s+(?P<nan>\w+)\s+is\s+nan\s*\))"
    )
    NAME = (
        r"[A-Za-z_][A-Za-z0-9_]*"
        r"(?:\.(?:\"[^\"\\]+\"|[A-Za-z0-9_](?:[A-Za-z0-9_/-]*[A-Za-z0-9_])?))*"
    )
    END = r"$"


_NAME = re.compile(_TokenKind.NAME.value)
_OVER_STEPS = re.compile(_TokenKind.OVER_STEPS.value)
_TOKENS = [(kind, re.compile(kind.value)) for kind in _TokenKind]
_SPACE = re.compile(r"\s*")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_RELATIONS = {"=": Relation.EQUAL, "contains": Relation.CONTAINS, **{relation.value: relation for relation in Relation}}
_ORDERED = frozenset({Relation.LESS, Relation.AT_MOST, Relation.MORE, Relation.AT_LEAST})
_WORDS: dict[str, Literal] = {"true": True, "false": False, "null": None}
_STATES = {state.value: state for state in JobState}
_RESERVED = frozenset({"and", "or", "not", "in", "contains", "now", *_WORDS})


@dataclass(frozen=True, slots=True)
class _Token:
    kind: _TokenKind
    text: str
    at: int

    def is_end(self) -> bool:
        return self.kind is _TokenKind.END

    def has_text(self, *texts: str) -> bool:
        """True if it is one of these marks or words."""
        return self.kind in (_TokenKind.MARK, _TokenKind.NAME) and self.text.lower() in texts


class _Reader:
    """Reads tokens from the left; each method reads one rule of the grammar and leaves the token after it."""

    def __init__(self, text: str, now: float) -> None:
        self._text = text
        self._now = now
        self._num_comparisons = 0
        self.token = self._read(0)

    def any_of(self, depth: int) -> Condition:
        parts = [self._all_of(depth)]
        while self._accept("or", "||"):
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def wrong(self, message: str) -> InvalidCondition:
        token = self.token
        token_text = "the text ends here" if token.is_end() else f"found {token.text[:40]}"
        return InvalidCondition(self._text, token.at, len(token.text), f"{message}; {token_text}")

    def _all_of(self, depth: int) -> Condition:
        parts = [self._negated(depth)]
        while self._accept("and", "&&"):
            parts.append(self._negated(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _negated(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise self.wrong(f"more than {_MAX_DEPTH} parts inside each other")
        if self._accept("not", "!"):
            return Not(self._negated(depth + 1))
        opened = self._accept("(")
        if opened is None:
            return self._comparison()
        inner = self.any_of(depth + 1)
        if not self._accept(")"):
            raise InvalidCondition(self._text, opened.at, 1, "this ( has no ) that closes it")
        return inner

    def _comparison(self) -> Condition:
        self._num_comparisons += 1
        if self._num_comparisons > _MAX_COMPARISONS:
            raise self.wrong(f"more than {_MAX_COMPARISONS} comparisons")
        if self.token.kind not in (_TokenKind.NAME, _TokenKind.OVER_STEPS) or self.token.text.lower() in _RESERVED:
            raise self.wrong("expected a name, such as loss, state, label.team or optimizer.lr")
        name = self._next()
        field = _field_at(self._text, name.at, name.text)
        is_negated = self._accept("not") is not None
        if self._accept("in"):
            parts = tuple(Compared(field, Relation.EQUAL, literal) for literal in self._list(field))
            return Not(AnyOf(parts)) if is_negated else AnyOf(parts)
        if is_negated:
            raise self.wrong(f"expected `in` after `{name.text} not`")
        if mark := self._accept("!=", *_RELATIONS):
            relation = _RELATIONS.get(mark.text.lower(), Relation.EQUAL)
            self._require_fits(field, relation, mark)
            compared = Compared(field, relation, self._literal(field, relation))
            return Not(compared) if mark.text == "!=" else compared
        if self.token.is_end() or self.token.has_text("and", "or", ")", "&&", "||"):
            return IsSet(field)
        raise self.wrong(f"expected ==, !=, <, <=, >, >=, ~ or in after {name.text}")

    def _require_fits(self, field: Field, relation: Relation, mark: _Token) -> None:
        allowed = {
            Kind.STATE: {Relation.EQUAL, Relation.CONTAINS},
            Kind.SWITCH: {Relation.EQUAL},
            Kind.NUMBER: {Relation.EQUAL, *_ORDERED},
            Kind.TIME: {Relation.EQUAL, *_ORDERED},
        }.get(field.kind)
        if allowed is not None and relation not in allowed:
            message = f"{field.name} is {_KIND_WORDS[field.kind]}: it has no {mark.text}"
            raise InvalidCondition(self._text, mark.at, len(mark.text), message)

    def _list(self, field: Field) -> list[Literal]:
        closing = {"(": ")", "[": "]"}.get(self.token.text)
        if closing is None:
            raise self.wrong('expected a list, such as ("FAILED", "CANCELLED")')
        self._next()
        literals = [self._literal(field, Relation.EQUAL)]
        while self._accept(","):
            self._num_comparisons += 1
            literals.append(self._literal(field, Relation.EQUAL))
        if self._num_comparisons > _MAX_COMPARISONS:
            raise self.wrong(f"more than {_MAX_COMPARISONS} comparisons")
        if not self._accept(closing):
            raise self.wrong(f"expected , or {closing}")
        return literals

    def _literal(self, field: Field, relation: Relation) -> Literal:
        """Reads a literal that the field can have."""
        at = self.token
        value = self._value(field)
        expected = _EXPECTED[field.kind]
        if relation is Relation.CONTAINS:
            expected = frozenset({str})
        elif relation in _ORDERED:
            expected -= {bool, type(None)}
        if field.kind is Kind.TIME and isinstance(value, str):
            value = self._moment(value, at)
        if type(value) not in expected:
            message = f"{field.name} is {_KIND_WORDS[field.kind]}: it is not compared with {at.text[:40]}"
            if relation is Relation.CONTAINS:
                message = '~ needs a text in quotes, such as "speech"'
            raise InvalidCondition(self._text, at.at, len(at.text), message)
        if field.kind is Kind.STATE and isinstance(value, str) and relation is Relation.EQUAL:
            if value.upper() not in _STATES:
                message = f"{value[:40]!r} is not a state of a job: use one of {', '.join(_STATES)}"
                raise InvalidCondition(self._text, at.at, len(at.text), message)
            return value.upper()
        return value

    def _value(self, field: Field) -> Literal:
        token = self.token
        is_now, sign = self._accept("now"), self._accept("-", "+")
        if sign:
            number = self._number("a duration, such as 7d" if is_now else "a number")
            return (self._now if is_now else 0.0) + (-number if sign.text == "-" else number)
        if is_now:
            return self._now
        match token.kind:
            case _TokenKind.NUMBER:
                return self._number("a number")
            case _TokenKind.DATE:
                self._next()
                return self._moment(token.text, token) if field.kind is Kind.TIME else token.text
            case _TokenKind.TEXT:
                self._next()
                return re.sub(r"\\(.)", r"\1", token.text[1:-1])
        if token.kind is _TokenKind.NAME and token.text.lower() in _WORDS:
            self._next()
            return _WORDS[token.text.lower()]
        if token.kind is _TokenKind.NAME and token.text.lower() not in _RESERVED:
            raise self.wrong(f'text needs quotes: "{token.text}"')
        raise self.wrong('expected a value, such as 1e-3, "text", true, now - 7d or 2026-11-20')

    def _number(self, expected: str) -> float:
        token = self.token
        if token.kind is not _TokenKind.NUMBER:
            raise self.wrong(f"expected {expected}")
        digits = re.match(r"[0-9.]+(?:[eE][+-]?[0-9]+)?", token.text)
        assert digits is not None, "the pattern of the token"
        unit = token.text[digits.end() :]
        value = float(digits.group())
        if unit and unit not in _UNITS:
            message = f"{unit!r} is not a unit of time: use {', '.join(_UNITS)}, such as 7d"
            raise InvalidCondition(self._text, token.at, len(token.text), message)
        if not abs(value) < 1e300:
            raise InvalidCondition(self._text, token.at, len(token.text), "the number is too large")
        self._next()
        return value * _UNITS.get(unit, 1.0)

    def _moment(self, text: str, token: _Token) -> float:
        try:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            message = f"{text[:40]!r} is not a time: write 2026-11-20, 2026-11-20T08:00Z, or now - 7d"
            raise InvalidCondition(self._text, token.at, len(token.text), message) from None

    def _accept(self, *texts: str) -> _Token | None:
        """Return the present token and read the one after it, if it is one of these marks or words; else None."""
        return self._next() if self.token.has_text(*texts) else None

    def _next(self) -> _Token:
        """Return the present token and read the one after it."""
        token = self.token
        self.token = self._read(token.at + len(token.text))
        return token

    def _read(self, start: int) -> _Token:
        space = _SPACE.match(self._text, start)
        at = space.end() if space is not None else start
        if at >= len(self._text):
            return _Token(_TokenKind.END, "", len(self._text))
        for kind, pattern in _TOKENS:
            match = pattern.match(self._text, at)
            if match is not None and match.end() > at:
                return _Token(kind, match.group(), at)
        letter = self._text[at]
        message = "this text has no quote that closes it" if letter in "\"'" else f"{letter!r} has no meaning here"
        raise InvalidCondition(self._text, at, 1, message)


_EXPECTED: dict[Kind, frozenset[type]] = {
    Kind.TEXT: frozenset({str, type(None)}),
    Kind.STATE: frozenset({str, type(None)}),
    Kind.NUMBER: frozenset({float, type(None)}),
    Kind.TIME: frozenset({float, type(None)}),
    Kind.SWITCH: frozenset({bool, type(None)}),
    Kind.LABEL: frozenset({str, float, type(None)}),
    Kind.ANY: frozenset({str, float, bool, type(None)}),
}
_KIND_WORDS: dict[Kind, str] = {
    Kind.TEXT: "a text",
    Kind.STATE: "a state",
    Kind.NUMBER: "a number",
    Kind.TIME: "a time",
    Kind.SWITCH: "true or false",
    Kind.LABEL: "a text or a number",
    Kind.ANY: "a text, a number, true or false",
}


MAX_SELECTORS = 8
"""Selectors in one question, at most."""
MAX_WORDS = 8
_MAX_VALUE = 255


@dataclass(eq=False)
class InvalidSelector(ValueError):
    """The text is none of the four forms."""

    text: str

    def __str__(self) -> str:
        return f"label {self.text[:80]!r}: use NAME, !NAME, NAME=VALUE or NAME!=VALUE."


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Selects the jobs that have a label with this value."""

    name: str
    value: str | None = None
    """None means any."""
    negated: bool = False
    """True to select the other jobs."""

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Raises InvalidSelector."""
        name, equals, value = text.partition("=")
        negated = name.endswith("!") if equals else name.startswith("!")
        name = (name[:-1] if equals else name[1:]) if negated else name
        if not is_job_name(name.strip()) or len(value) > _MAX_VALUE:
            raise InvalidSelector(text)
        return cls(name.strip(), value if equals else None, negated)


def search_words(text: str) -> tuple[str, ...]:
    """A job is found if it has every one of them, in its name, id, project, user or labels; the first MAX_WORDS."""
    return tuple(text.split()[:MAX_WORDS])
