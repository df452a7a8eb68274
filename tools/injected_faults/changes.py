"""Every small change that a source text allows, and a seeded draw among them.

A change replaces the text between two positions and nothing else. Only statements inside functions are changed, by the
kinds of `Kind`; annotations, assertions, log lines and f-strings are left alone.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from injected_faults.sources import ROOT, iterate_statements, list_modules


class Kind(StrEnum):
    """What is changed."""

    COMPARISON = "comparison turned"
    BOUND = "bound moved by one"
    DROPPED = "statement dropped"
    SWAPPED = "arguments swapped"
    BOOLEAN = "boolean operator turned"
    CONSTANT = "constant changed"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One changed place of one module."""

    path: str
    kind: Kind
    statement: int
    """Its number in the module, see `sources`."""
    line: int
    start: int
    """Position in the source text, in characters; `end` too."""
    end: int
    replacement: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.start}:{self.end}:{self.replacement}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]

    def describe(self, source: str) -> tuple[str, str]:
        """The changed line or lines, before and after, without indentation and with single spaces."""
        first = source.rfind("\n", 0, self.start) + 1
        last = source.find("\n", self.end)
        last = len(source) if last < 0 else last
        before, after = source[first:last], source[first : self.start] + self.replacement + source[self.end : last]
        return " ".join(before.split()), " ".join(after.split())


_TURNED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.GtE: (">=", "<"),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_MOVED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
_SYMMETRIC = {"min", "max", "print"}
_LOGGERS = {"log", "_log", "logger", "_logger", "logging"}


def draw_faults(room: str, seed: int, is_reached: Callable[[Fault], bool] = lambda _: True) -> Iterator[Fault]:
    """The changes of a room in a drawn order, at most one for each reached statement, the kinds by turns."""
    rng = random.Random(f"{seed} {room}")
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in list_modules(room)}
    by_kind: dict[Kind, list[Fault]] = defaultdict(list)
    for path, source in sources.items():
        for fault in list_changes(path, source):
            by_kind[fault.kind].append(fault)
    for faults in by_kind.values():
        rng.shuffle(faults)
    used: set[tuple[str, int]] = set()
    while any(by_kind.values()):
        for kind in rng.sample(list(Kind), len(Kind)):
            while by_kind[kind]:
                fault = by_kind[kind].pop()
                statement = fault.path, fault.statement
                if statement not in used and is_reached(fault) and is_change(sources[fault.path], fault):
                    used.add(statement)
                    yield fault
                    break


def list_changes(path: str, source: str) -> list[Fault]:
    """The changes of one module, in the order of its statements."""
    return [*_Finder(path, source).find()]


def is_change(source: str, fault: Fault) -> bool:
    """False if the changed text does not parse, or parses to the same program."""
    try:
        return ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._statement = 0

    def find(self) -> Iterator[Fault]:
        for number, statement in enumerate(iterate_statements(ast.parse(self._source))):
            self._statement = number
            if isinstance(statement, ast.Assert | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if _is_log_line(statement):
                continue
            if _can_be_dropped(statement):
                yield self._fault(Kind.DROPPED, *self._span(statement), "pass")
            for expression in _header(statement):
                for node in _walk(expression):
                    yield from self._changes(node)

    def _changes(self, node: ast.AST) -> Iterator[Fault]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for before, operator, after in zip(operands, node.ops, operands[1:], strict=False):
                    yield from self._operator(Kind.COMPARISON, before, after, _TURNED.get(type(operator)))
                    yield from self._operator(Kind.BOUND, before, after, _MOVED.get(type(operator)))
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for before, after in zip(node.values, node.values[1:], strict=False):
                    yield from self._operator(Kind.BOOLEAN, before, after, words)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._span(node)
                yield self._fault(Kind.BOOLEAN, start, self._span(node.operand)[0], "", check="not")
            case ast.Constant(value=bool()):
                yield self._fault(Kind.CONSTANT, *self._span(node), str(not node.value))
            case ast.Constant(value=int() | float()):
                yield self._fault(Kind.CONSTANT, *self._span(node), str(node.value + 1))
            case ast.Call():
                yield from self._call(node)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    yield from self._moved(bound)

    def _call(self, node: ast.Call) -> Iterator[Fault]:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "range" and node.args:
            yield from self._moved(node.args[min(len(node.args), 2) - 1])
        if name in _SYMMETRIC:
            return
        for first, second in zip(node.args, node.args[1:], strict=False):
            if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
                continue
            (start, middle), (after, end) = self._span(first), self._span(second)
            texts = self._source[start:middle], self._source[after:end]
            swapped = f"{texts[1]}{self._source[middle:after]}{texts[0]}"
            yield self._fault(Kind.SWAPPED, start, end, swapped)

    def _moved(self, bound: ast.expr | None) -> Iterator[Fault]:
        if bound is not None and not isinstance(bound, ast.Constant | ast.Starred):
            start, end = self._span(bound)
            yield self._fault(Kind.BOUND, start, end, f"({self._source[start:end]}) + 1")

    def _operator(
        self, kind: Kind, before: ast.expr, after: ast.expr, texts: tuple[str, str] | None
    ) -> Iterator[Fault]:
        """The operator between two operands. Parentheses, comments and line ends can stand around it."""
        start, end = self._span(before)[1], self._span(after)[0]
        between = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self._source[start:end])
        if texts is not None and (match := re.fullmatch(rf"[\s)\\]*({texts[0]})[\s(\\]*", between)):
            yield self._fault(kind, start + match.start(1), start + match.end(1), texts[1])

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Positions in characters; `ast` has lines and bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        ends = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        start, end = (
            self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode()) for line, column in ends
        )
        return start, end

    def _fault(self, kind: Kind, start: int, end: int, replacement: str, check: str = "") -> Fault:
        assert self._source.startswith(check, start)
        line = self._source.count("\n", 0, start) + 1
        return Fault(
            path=self._path,
            kind=kind,
            statement=self._statement,
            line=line,
            start=start,
            end=end,
            replacement=replacement,
        )


def _is_log_line(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    return (isinstance(owner, ast.Name) and owner.id.lower() in _LOGGERS) or (
        isinstance(owner, ast.Attribute) and owner.attr in _LOGGERS
    )


def _can_be_dropped(statement: ast.stmt) -> bool:
    """True for statements whose absence does not only leave a name undefined."""
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Return(value=None):
            return True
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        case _:
            return False


def _header(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement that are not statements of their own."""
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "cases", "annotation"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part


def _walk(expression: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in f-strings, whose positions are wrong before Python 3.12."""
    if isinstance(expression, ast.JoinedStr):
        return
    yield expression
    for child in ast.iter_child_nodes(expression):
        yield from _walk(child)
