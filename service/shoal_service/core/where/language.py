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
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias

from shoal_service.core.where.fields import Field, Kind, Source, UnknownName, field_named, series_field
from shoal_workers.contract import JobState

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


class InvalidCondition(ValueError):
    """The text is not of the language. `at`: index of the first letter of the mistake."""

    def __init__(self, text: str, at: int, length: int, message: str) -> None:
        super().__init__(text, at, length, message)
        self.text = text
        self.at = at
        self.length = length
        self.message = message

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


def label_number(text: str) -> float | None:
    """The number that a label reads as; None if it is none. The store asks the same by the same pattern."""
    return float(text) if re.search(LABEL_NUMBER, text) else None


LABEL_NUMBER = r"^-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?$"
"""A number of a length that both databases convert without an error."""


def _separated(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    for part in text.split(",") if text.strip() else ():
        yield at + len(part) - len(part.lstrip()), part.strip()
        at += len(part) + 1


def _field_at(text: str, at: int, name: str) -> Field:
    if _NAME.fullmatch(name) is None and _OVER_STEPS.fullmatch(name) is None:
        raise InvalidCondition(text, at, len(name), f"{name[:80]!r} is not a name, such as loss or optimizer.lr")
    try:
        return _field_of(name)
    except UnknownName as error:
        raise InvalidCondition(text, at, len(name), error.message) from None


def _field_of(name: str) -> Field:
    match = _OVER_STEPS.fullmatch(name)
    if match is None:
        return field_named(_parts(name))
    function = match["function"] or "first"
    return series_field(name, function.lower(), match["column"] or match["nan"])


class _Token(StrEnum):
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


_NAME = re.compile(_Token.NAME.value)
_OVER_STEPS = re.compile(_Token.OVER_STEPS.value)
_TOKENS = [(kind, re.compile(kind.value)) for kind in _Token]
_SPACE = re.compile(r"\s*")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_RELATIONS = {"=": Relation.EQUAL, "contains": Relation.CONTAINS, **{relation.value: relation for relation in Relation}}
_ORDERED = frozenset({Relation.LESS, Relation.AT_MOST, Relation.MORE, Relation.AT_LEAST})
_WORDS: dict[str, Literal] = {"true": True, "false": False, "null": None}
_STATES = {state.value: state for state in JobState}
_RESERVED = frozenset({"and", "or", "not", "in", "contains", "now", *_WORDS})


@dataclass(frozen=True, slots=True)
class _Found:
    kind: _Token
    text: str
    at: int

    def is_end(self) -> bool:
        return self.kind is _Token.END

    def is_(self, *message: str) -> bool:
        return self.kind in (_Token.MARK, _Token.NAME) and self.text.lower() in message


class _Reader:
    """Reads tokens from the left; each method reads one rule of the grammar and leaves the token after it."""

    def __init__(self, text: str, now: float) -> None:
        self._text = text
        self._now = now
        self._num = 0
        self.token = self._read(0)

    def any_of(self, depth: int) -> Condition:
        parts = [self._all_of(depth)]
        while self.token.is_("or", "||"):
            self._next()
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def wrong(self, message: str) -> InvalidCondition:
        token = self.token
        token_text = "the text ends here" if token.is_end() else f"found {token.text[:40]}"
        return InvalidCondition(self._text, token.at, len(token.text), f"{message}; {token_text}")

    def _all_of(self, depth: int) -> Condition:
        parts = [self._negated(depth)]
        while self.token.is_("and", "&&"):
            self._next()
            parts.append(self._negated(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _negated(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise self.wrong(f"more than {_MAX_DEPTH} parts inside each other")
        if self.token.is_("not", "!"):
            self._next()
            return Not(self._negated(depth + 1))
        if not self.token.is_("("):
            return self._comparison()
        opened = self._next()
        inner = self.any_of(depth + 1)
        if not self.token.is_(")"):
            raise InvalidCondition(self._text, opened.at, 1, "this ( has no ) that closes it")
        self._next()
        return inner

    def _comparison(self) -> Condition:
        self._num += 1
        if self._num > _MAX_COMPARISONS:
            raise self.wrong(f"more than {_MAX_COMPARISONS} comparisons")
        if self.token.kind not in (_Token.NAME, _Token.OVER_STEPS) or self.token.text.lower() in _RESERVED:
            raise self.wrong("expected a name, such as loss, state, label.team or optimizer.lr")
        name = self._next()
        field = self._field(name)
        is_negated = self.token.is_("not")
        if is_negated:
            self._next()
            if not self.token.is_("in"):
                raise self.wrong(f"expected `in` after `{name.text} not`")
        if self.token.is_("in"):
            self._next()
            parts = tuple(Compared(field, Relation.EQUAL, literal) for literal in self._list(field))
            return Not(AnyOf(parts)) if is_negated else AnyOf(parts)
        if self.token.is_("!=", *_RELATIONS):
            mark = self._next()
            relation = _RELATIONS.get(mark.text.lower(), Relation.EQUAL)
            self._require_fits(field, relation, mark)
            compared = Compared(field, relation, self._literal(field, relation))
            return Not(compared) if mark.text == "!=" else compared
        if self.token.is_end() or self.token.is_("and", "or", ")", "&&", "||"):
            return IsSet(field)
        raise self.wrong(f"expected ==, !=, <, <=, >, >=, ~ or in after {name.text}")

    def _field(self, name: _Found) -> Field:
        try:
            return _field_of(name.text)
        except UnknownName as error:
            raise InvalidCondition(self._text, name.at, len(name.text), error.message) from None

    def _require_fits(self, field: Field, relation: Relation, mark: _Found) -> None:
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
        while self.token.is_(","):
            self._next()
            self._num += 1
            literals.append(self._literal(field, Relation.EQUAL))
        if not self.token.is_(closing):
            raise self.wrong(f"expected , or {closing}")
        if self._num > _MAX_COMPARISONS:
            raise self.wrong(f"more than {_MAX_COMPARISONS} comparisons")
        self._next()
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
        if token.is_("now"):
            self._next()
            if not self.token.is_("-", "+"):
                return self._now
            sign = 1.0 if self._next().text == "+" else -1.0
            return self._now + sign * self._number("a duration, such as 7d")
        if token.is_("-", "+"):
            self._next()
            return (-1.0 if token.text == "-" else 1.0) * self._number("a number")
        match token.kind:
            case _Token.NUMBER:
                return self._number("a number")
            case _Token.DATE:
                self._next()
                return self._moment(token.text, token) if field.kind is Kind.TIME else token.text
            case _Token.TEXT:
                self._next()
                return re.sub(r"\\(.)", r"\1", token.text[1:-1])
        if token.kind is _Token.NAME and token.text.lower() in _WORDS:
            self._next()
            return _WORDS[token.text.lower()]
        if token.kind is _Token.NAME and token.text.lower() not in _RESERVED:
            raise self.wrong(f'text needs quotes: "{token.text}"')
        raise self.wrong('expected a value, such as 1e-3, "text", true, now - 7d or 2026-11-20')

    def _number(self, expected: str) -> float:
        token = self.token
        if token.kind is not _Token.NUMBER:
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

    def _moment(self, text: str, token: _Found) -> float:
        try:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            message = f"{text[:40]!r} is not a time: write 2026-11-20, 2026-11-20T08:00Z, or now - 7d"
            raise InvalidCondition(self._text, token.at, len(token.text), message) from None

    def _next(self) -> _Found:
        """Returns the present token and reads the one after it."""
        token = self.token
        self.token = self._read(token.at + len(token.text))
        return token

    def _read(self, start: int) -> _Found:
        space = _SPACE.match(self._text, start)
        at = space.end() if space is not None else start
        if at >= len(self._text):
            return _Found(_Token.END, "", len(self._text))
        for kind, pattern in _TOKENS:
            match = pattern.match(self._text, at)
            if match is not None and match.end() > at:
                return _Found(kind, match.group(), at)
        letter = self._text[at]
        message = "this text has no quote that closes it" if letter in "\"'" else f"{letter!r} has no meaning here"
        raise InvalidCondition(self._text, at, 1, message)


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.strip('"') for part in re.findall(r'"[^"]+"|[^.]+', name))


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
