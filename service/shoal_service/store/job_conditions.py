"""Conditions and orders of `core/where` in SQL, with the same meaning on SQLite and PostgreSQL.

Each value is read with a type: of a JSON document, the text, the number or the boolean at a path, or NULL if something
else is there. So no cast fails, and text never equals a number. Each comparison is true or false, never NULL, so that
`not` is the opposite. Texts are compared by code points (collation C), and upper and lower case are the same for A to Z
only: both databases agree on that. Called by `job_lists`, which also passes the rows that `read_values` reads.

A setting is what the stored document of the newest version has: a key that the release of that time did not know is not
set.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Any, assert_never

from sqlalchemy import ColumnElement, Double, String, and_, case, cast, func, literal, not_, or_, select, true

from shoal_service.core.where.fields import FACTS, Field, JobDocuments, Kind, Source, value_of
from shoal_service.core.where.language import (
    LABEL_NUMBER,
    AllOf,
    AnyOf,
    Compared,
    Condition,
    IsSet,
    Literal,
    Not,
    Order,
    Relation,
)
from shoal_service.store.database import (
    NEWEST_SPEC,
    Transaction,
    job_labels,
    job_specs,
    jobs,
    json_text,
    json_type,
    series,
)
from shoal_service.store.records import QUEUE_POSITION, parse_fields
from shoal_workers.contract import EndReason

_Sql = ColumnElement[Any]
_SPEC = select(job_specs.c.document).where(NEWEST_SPEC).correlate(jobs).scalar_subquery()
_REFUSED = frozenset({"loss", "grad_norm"})
"""Columns of which one is not finite in the step at which a job stops for that reason; the step has no row."""
_DOCUMENTS: Mapping[Source, _Sql] = {Source.STATUS: jobs.c.status, Source.SETTING: _SPEC}
_TEXTS = frozenset({Kind.TEXT, Kind.STATE})
_NEVER = literal(0) == literal(1)
_COMPARISONS: Mapping[Relation, Callable[[_Sql, _Sql], ColumnElement[bool]]] = {
    Relation.EQUAL: operator.eq,
    Relation.LESS: operator.lt,
    Relation.AT_MOST: operator.le,
    Relation.MORE: operator.gt,
    Relation.AT_LEAST: operator.ge,
}
_PLAIN = re.compile(r"[A-Za-z0-9 ._:=-]*")
"""A text that JSON has as it is, so a value that holds it is in a document that holds it."""


def condition_in_sql(tx: Transaction, condition: Condition) -> ColumnElement[bool]:
    """The condition for a row of `jobs`."""
    return _Values(tx).holds(condition)


def order_in_sql(tx: Transaction, orders: Sequence[Order]) -> list[_Sql]:
    """Expressions to order rows of `jobs` by. Numbers come before texts, and jobs without a value last."""
    values = _Values(tx)
    return [
        (column.desc() if order.descending else column.asc()).nulls_last()
        for order in orders
        for column in values.sortable(order.field)
    ]


def read_values(tx: Transaction, nums: Sequence[int], columns: Sequence[Field]) -> dict[int, dict[str, Any]]:
    """The values of the jobs with these numbers, by number and name of the field; a job without a value has no name."""
    if not columns or not nums:
        return {num: {} for num in nums}
    labels, values_by_num = read_labels(tx, nums), {}
    over_steps = [_Values(tx).over_steps(field).label(field.name) for field in columns if field.source is Source.SERIES]
    query = select(jobs, _SPEC.label("spec"), QUEUE_POSITION.label("queue_position"), *over_steps).where(
        jobs.c.num.in_(nums)
    )
    for row in tx.execute(query):
        job = JobDocuments(
            columns=dict(row._mapping),
            status=parse_fields(row.status),
            spec=parse_fields(row.spec),
            labels=labels[row.num],
            queue_position=row.queue_position,
            archived=row.archived_at is not None,
        )
        values = {field.name: value_of(field, job) for field in columns}
        values_by_num[row.num] = {name: value for name, value in values.items() if value is not None}
    return values_by_num


def read_labels(tx: Transaction, nums: Sequence[int]) -> dict[int, dict[str, str]]:
    """Read the labels of the jobs with these numbers, by number of the job and by name."""
    labels: dict[int, dict[str, str]] = defaultdict(dict)
    query = select(job_labels).where(job_labels.c.job_num.in_(nums)).order_by(job_labels.c.job_num, job_labels.c.key)
    for row in tx.execute(query):
        labels[row.job_num][row.key] = row.value
    return labels


@dataclass(frozen=True, slots=True)
class _Values:
    """Reads fields of a row of `jobs` with a type."""

    tx: Transaction

    def holds(self, condition: Condition) -> ColumnElement[bool]:
        match condition:
            case Compared(field, relation, compared):
                return self._compared(field, relation, compared)
            case IsSet(field):
                return and_(self._is_set(field), not_(self._is_false(field)))
            case Not(part):
                return not_(self.holds(part))
            case AllOf(parts):
                return and_(*(self.holds(part) for part in parts))
            case AnyOf(parts):
                return or_(*(self.holds(part) for part in parts))
            case _:
                assert_never(condition)

    def sortable(self, field: Field) -> list[_Sql]:
        return [read(self, field) for read in _SORTED_BY[field.kind]]

    def _compared(self, field: Field, relation: Relation, compared: Literal) -> ColumnElement[bool]:
        if compared is None:
            return not_(self._is_set(field))
        if isinstance(compared, bool):
            value, operand = self._switch(field), literal(int(compared))
        elif isinstance(compared, str):
            value, operand = self._text(field), literal(compared, String)
        else:
            value, operand = self._number(field), literal(compared, Double)
        is_substring = relation is Relation.CONTAINS
        related = self._contains(value, str(compared)) if is_substring else _COMPARISONS[relation](value, operand)
        holds = func.coalesce(related, _NEVER)
        if is_substring and field.source is Source.SETTING and _PLAIN.fullmatch(str(compared)):
            # to look for a text is cheaper than to parse the document, and most documents do not have it
            return case((self._may_hold(str(compared)), holds), else_=_NEVER)
        return holds

    def _may_hold(self, text: str) -> ColumnElement[bool]:
        """True for each job whose spec has the text somewhere; `_` is any letter on SQLite."""
        if self._is_sqlite:
            return _SPEC.like(f"%{text}%")  # ignores case for A to Z only, and is faster than `instr`
        return self._contains(_SPEC, text)

    def _contains(self, value: _Sql, text: str) -> ColumnElement[bool]:
        folded = text.translate(str.maketrans(ascii_uppercase, ascii_lowercase))
        if self._is_sqlite:
            return func.instr(func.lower(value), folded) > 0  # SQLite's lower knows A to Z only
        return func.strpos(func.translate(value, ascii_uppercase, ascii_lowercase), folded) > 0

    def _is_set(self, field: Field) -> ColumnElement[bool]:
        if field.source is Source.ARCHIVED:
            return true()
        if field.source in _DOCUMENTS:
            return func.coalesce(self._json_type(field), "null" if field.default is None else "") != "null"
        return (self._text(field) if field.kind in _TEXTS else self._column(field)).is_not(None)

    def _is_false(self, field: Field) -> ColumnElement[bool]:
        if field.kind not in (Kind.SWITCH, Kind.ANY):
            return _NEVER
        return func.coalesce(self._switch(field) == 0, _NEVER)

    def _text(self, field: Field) -> _Sql:
        if field.source in _DOCUMENTS:
            is_text = self._json_type(field) == ("text" if self._is_sqlite else "string")
            value: _Sql = case((is_text, self._json_value(field)))
        else:
            assert field.source in (Source.COLUMN, Source.LABEL), f"{field.name} is not a text"
            value = func.nullif(self._column(field), "") if field.source is Source.COLUMN else self._column(field)
        return value if self._is_sqlite else cast(value, String).collate("C")

    def _number(self, field: Field) -> _Sql:
        if field.source in _DOCUMENTS:
            json_type, types = self._json_type(field), ("integer", "real") if self._is_sqlite else ("number",)
            number = (json_type.in_(types), cast(self._json_value(field), Double))
            return case(number) if field.default is None else case(number, (json_type.is_(None), field.default))
        value = self._column(field)
        if field.source is Source.LABEL:
            return case((value.regexp_match(LABEL_NUMBER), cast(value, Double)))
        return value

    def _column(self, field: Field) -> _Sql:
        """Return a value that is not in a document."""
        match field.source:
            case Source.COLUMN:
                return jobs.c[field.path[0]]
            case Source.QUEUE:
                return QUEUE_POSITION
            case Source.SERIES:
                return self.over_steps(field)
            case Source.LABEL:
                return _label(field.path[0])
            case Source.ARCHIVED | Source.STATUS | Source.SETTING:
                raise AssertionError(f"{field.name} has no column")
            case _:
                assert_never(field.source)

    def _switch(self, field: Field) -> _Sql:
        """1 for true, 0 for false."""
        if field.source is Source.ARCHIVED:
            return case((jobs.c.archived_at.is_not(None), 1), else_=0)
        if self._is_sqlite:
            json_type = self._json_type(field)
            return case((json_type == "true", 1), (json_type == "false", 0))
        text = self._json_value(field)
        return case((self._json_type(field) == "boolean", case((text == "true", 1), else_=0)))

    def over_steps(self, field: Field) -> _Sql:
        """The value over all steps of a row of `jobs`. A step whose value is not finite has NULL, as has one of a
        script that has not reported it, so `first` looks behind the first value only. A job that ended at a step that
        was not finite has completed the one before. Reads every step of the job."""
        function, name = field.path
        column, of_job = series.c[name], series.c.job_num == jobs.c.num
        if function != "first":
            value = func.max(column) if function == "max" else func.min(column)
            return select(value).where(of_job).correlate(jobs).scalar_subquery()
        begins = select(func.min(series.c.step)).where(of_job, column.is_not(None)).correlate(jobs).scalar_subquery()
        where = (of_job, column.is_(None), series.c.step > begins)
        stored = select(func.min(series.c.step)).where(*where).correlate(jobs).scalar_subquery()
        if name not in _REFUSED:
            return stored
        stopped = self._text(FACTS["reason"]) == EndReason.NON_FINITE.value
        return func.coalesce(stored, case((stopped, self._number(FACTS["step"]) + 1)))

    @property
    def _is_sqlite(self) -> bool:
        return self.tx.connection.dialect.name == "sqlite"

    def _json_type(self, field: Field) -> _Sql:
        return json_type(self.tx, _DOCUMENTS[field.source], *field.path)

    def _json_value(self, field: Field) -> _Sql:
        return json_text(self.tx, _DOCUMENTS[field.source], *field.path)


_SORTED_BY: Mapping[Kind, tuple[Callable[[_Values, Field], _Sql], ...]] = {
    Kind.TEXT: (_Values._text,),
    Kind.STATE: (_Values._text,),
    Kind.NUMBER: (_Values._number,),
    Kind.TIME: (_Values._number,),
    Kind.SWITCH: (_Values._switch,),
    Kind.LABEL: (_Values._number, _Values._text),
    Kind.ANY: (_Values._number, _Values._text, _Values._switch),
}


def _label(name: str) -> _Sql:
    return (
        select(job_labels.c.value)
        .where(job_labels.c.job_num == jobs.c.num, job_labels.c.key == name)
        .correlate(jobs)
        .scalar_subquery()
    )
