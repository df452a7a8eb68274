"""Reads the text of a program and of the modules beside it that it imports, without importing or running them.

Looks for calls by their full names, so that `DDP(model)` is found under every name that it was imported as. Says which
ranks alone make a call, as far as the conditions around it tell. `program_findings.py` judges what is found.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal_api.cli.errors import CliError

_MAX_FILES = 200
DDP = "torch.nn.parallel.DistributedDataParallel"
TRAINERS = (
    *("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.Trainer"),
    *(f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO", "PPO", "RLOO", "KTO", "ORPO", "CPO", "Reward")),
)
"""Trainers that have the loop, and save and resume by themselves."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    """Full name of what is called; `.backward` for a method of an object whose class is not known."""
    place: str
    keywords: dict[str, ast.expr]
    args: tuple[ast.expr, ...]
    side: str = ""
    """Which ranks make the call: `rank 0` below `if rank == 0`, `others` in its else, and empty for all ranks."""


@dataclass
class Function:
    """What a function of the program calls on each rank that calls it."""

    parameters: list[str]
    calls: set[str] = field(default_factory=set)


@dataclass
class ProgramText:
    """The text of a program: its calls, in the order of its lines."""

    calls_made: list[Call] = field(default_factory=list)
    classes: list[tuple[str, str]] = field(default_factory=list)
    """Last part of the name of each base, and its place."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    writes: list[tuple[str, str]] = field(default_factory=list)
    """Keys that are assigned in os.environ."""
    names: list[tuple[str, str]] = field(default_factory=list)
    """Full names that are read."""
    trainers: dict[str, str] = field(default_factory=dict)
    """Names of classes whose base is one of TRAINERS, and that base."""
    wrapped: set[str] = field(default_factory=set)
    """Names of variables that are models in DistributedDataParallel."""
    texts_by_name: dict[str, str] = field(default_factory=dict)
    """What is assigned to variables, or what it begins with."""
    functions: dict[str, Function] = field(default_factory=dict)
    """Functions of the program: `FILE:NAME` for calls in the file, `MODULE.NAME` for others."""
    num_files: int = 0

    def calls_below(self, *packages: str) -> tuple[str, ...]:
        """Return where something of these packages is called."""
        return tuple(call.place for call in self.calls_made if call.name.startswith(packages))

    def calls(self, *names: str) -> tuple[str, ...]:
        """Return where one of these is called. A name that begins with a dot is a method of any object."""
        methods = tuple(name for name in names if name.startswith("."))
        return tuple(
            call.place for call in self.calls_made if call.name in names or call.name.endswith(methods or ("\0",))
        )

    def keywords_of(self, *names: str) -> dict[str, ast.expr]:
        """Return the keywords of the only call of one of these; {} if there are several, which may differ."""
        calls = [call for call in self.calls_made if call.name in names]
        return calls[0].keywords if len(calls) == 1 else {}

    def keywords(self, *names: str) -> tuple[str, ...]:
        return tuple(call.place for call in self.calls_made if any(is_given(call.keywords.get(name)) for name in names))

    def bases(self, name: str) -> tuple[str, ...]:
        return tuple(place for base, place in self.classes if base == name)

    def environment_writes(self, keys: frozenset[str]) -> tuple[str, ...]:
        return tuple(place for key, place in self.writes if key in keys)

    def function(self, call: Call) -> Function:
        """Return the function of the program that is called; one that calls nothing if it is none."""
        here = f"{call.place.rpartition(':')[0]}:{call.name}"
        return self.functions.get(here) or self.functions.get(call.name) or Function([])

    def mentions(self, text: str) -> bool:
        return any(text in literal for literal, _ in self.texts)

    def text(self, value: ast.expr | None) -> str:
        """Return a text, or what it begins with, also over a variable; empty for another expression."""
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=[first, *_]) | ast.BinOp(left=first) | ast.Call(func=ast.Attribute(value=first)):
                return self.text(first)
            case ast.Name(id=name):
                return self.texts_by_name.get(name, "")
        return ""

    def reads(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return where one of these attributes is read."""
        return tuple(place for name, place in self.names if name in names)

    def first_gpus(self) -> tuple[str, ...]:
        """Return where the first GPU of a node is named, whatever the rank."""
        named = [place for text, place in self.texts if text == "cuda:0"]
        by_call = (
            call.place
            for call in self.calls_made
            if (call.name.endswith((".cuda", "torch.cuda.set_device")) and _is_zero(call.args[:1]))
            or (call.name == "torch.device" and _is_zero(call.args[1:2]))
        )
        return tuple(dict.fromkeys([*named, *by_call]))


def is_given(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value in (None, False))


def _is_zero(values: Sequence[ast.expr]) -> bool:
    return any(isinstance(item, ast.Constant) and item.value == 0 and item.value is not False for item in values)


def read_program(script: Path, directory: Path) -> ProgramText:
    source = ProgramText()
    roots = [script.resolve().parent, directory.resolve()]
    left, seen = [script.resolve()], {script.resolve()}
    while left and source.num_files < _MAX_FILES:
        path = left.pop(0)
        visitor = _Visitor(source, relative_path(path, directory))
        tree = _parsed(path, is_script=not source.num_files)
        source.num_files += 1
        if tree is None:
            continue
        visitor.visit(tree)
        for name in visitor.imported:
            for file in _local_files(name, path, roots):
                if file not in seen:
                    seen.add(file)
                    left.append(file)
    trainers = source.trainers
    source.calls_made = [
        replace(call, name=trainers.get(call.name.rpartition(".")[2], call.name)) for call in source.calls_made
    ]
    return source


def _parsed(path: Path, *, is_script: bool) -> ast.Module | None:
    """Parse a file. One that the script imports may be for another version of Python: it is passed over."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        if is_script:
            raise CliError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        if is_script:
            line = getattr(error, "lineno", None)
            raise CliError(
                f"{path.name}{f':{line}' if line else ''} is not valid Python: {getattr(error, 'msg', error)}",
                hint="a program in Python can be checked",
            ) from None
    return None


def _local_files(name: str, path: Path, roots: Iterable[Path]) -> Iterator[Path]:
    """Find the files of a module that is part of the program. `name`: with a leading dot for each level if relative."""
    levels = len(name) - len(name.lstrip("."))
    parts = [part for part in name.split(".") if part]
    folders = [path.parents[min(levels, len(path.parents)) - 1]] if levels else roots
    for folder in folders:
        for count in range(1, len(parts) + 1):
            module = folder.joinpath(*parts[:count])
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file():
                    yield file.resolve()


def relative_path(path: Path, directory: Path) -> str:
    path, directory = path.resolve(), directory.resolve()
    return path.relative_to(directory).as_posix() if path.is_relative_to(directory) else str(path)


_SAME = (
    ("lightning.pytorch.", "lightning."),
    ("pytorch_lightning.", "lightning."),
    ("lightning.fabric.", "lightning."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("transformers.trainer.", "transformers."),
)
"""Other paths of the same names."""


class _Visitor(ast.NodeVisitor):
    """Reads a file into a `ProgramText`, with the names that its imports give."""

    def __init__(self, source: ProgramText, file: str) -> None:
        self._source = source
        self._file = file
        self._names: dict[str, str] = {}
        self._side = ""
        """Which ranks alone are here, as in `Call`."""
        self._function: Function | None = None
        self._conditions: dict[str, ast.expr] = {}
        """What is assigned to variables that may say which rank this is."""
        self.imported: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.append(alias.name)
            self._names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        self.imported.append(module)
        for alias in node.names:
            separator = "" if not module or module.endswith(".") else "."
            self.imported.append(f"{module}{separator}{alias.name}")
            if not node.level:
                self._names[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        call = Call(self._name(node.func), self._place(node), keywords, tuple(node.args), self._side)
        self._source.calls_made.append(call)
        if self._function is not None and not call.side:
            self._function.calls.add(call.name)
        if call.name == "os.environ.update":
            self._write(node, *node.args)
        self.generic_visit(node)

    def _write(self, node: ast.expr | ast.stmt, *given: ast.expr) -> None:
        """Note the keys of what is written into the environment: keywords, `{...}` or `dict(...)`."""
        for value in (node, *given):
            keys = value.keys if isinstance(value, ast.Dict) else value.keywords if isinstance(value, ast.Call) else []
            names = (key.arg if isinstance(key, ast.keyword) else getattr(key, "value", None) for key in keys)
            self._source.writes += [(str(name), self._place(node)) for name in names]

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._name(node.target) == "os.environ":
            self._write(node, node.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        before, (of_body, of_else) = self._side, self._sides(node.test)
        for side, statements in ((of_body, node.body), (of_else, node.orelse)):
            self._side = before or side
            for statement in statements if isinstance(statements, list) else [statements]:
                self.visit(statement)
        is_left = isinstance(node.body, list) and isinstance(node.body[-1], ast.Return)
        self._side = before or (of_else if is_left else "")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`rank == 0 and dist.barrier()`"""
        before = self._side
        for value in node.values:
            self.visit(value)
            self._side = self._side or self._sides(value)[isinstance(node.op, ast.Or)]
        self._side = before

    def _sides(self, test: ast.expr) -> tuple[str, str]:
        """Return the sides, as in `Call`, of the branch of a condition and of its else."""
        values = [_value(test, rank, self._conditions) for rank in (0, 1, 2)]
        is_here, is_there, is_beyond = (None if value is None else bool(value) for value in values)
        if is_there is not is_beyond:
            return "", ""
        of_body = "rank 0" if is_there is False and is_here is not False else ""
        of_else = "rank 0" if is_there and not is_here else ""
        return of_body or ("others" if of_else else ""), of_else or ("others" if of_body else "")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit the body for all ranks: a definition below `if rank == 0` does not say who calls it. Within the body,
        only rank 0 runs what follows `if rank != 0: return`."""
        before, self._side = (self._side, self._function), ""
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        self._function = function = Function(parameters)
        module = self._file.removesuffix(".py").replace("/", ".")
        self._source.functions |= {f"{self._file}:{node.name}": function, f"{module}.{node.name}": function}
        self.generic_visit(node)
        self._side, self._function = before

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(inner, ast.Call) and self._name(inner.func) == DDP for inner in ast.walk(node.value)):
            self._source.wrapped.update(self._name(target) for target in node.targets)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._conditions[target.id] = node.value
                self._source.texts_by_name[target.id] = self._source.text(node.value)
                if self._name(node.value) == "os.environ":
                    self._names[target.id] = "os.environ"
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = self._name(base)
            last = name.rpartition(".")[2]
            self._source.classes.append((last, self._place(node)))
            name = self._source.trainers.get(last, name)
            if name in TRAINERS:
                self._source.trainers[node.name] = name
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._source.names.append((self._name(node), self._place(node)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._source.texts.append((node.value, self._place(node)))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = node.slice
        if isinstance(node.ctx, ast.Store) and isinstance(key, ast.Constant) and self._name(node.value) == "os.environ":
            self._source.writes.append((str(key.value), self._place(node)))
        self.generic_visit(node)

    def _name(self, node: ast.expr) -> str:
        """Return the full name of an expression, as its imports give it."""
        if isinstance(node, ast.Name):
            return _usual_name(self._names.get(node.id, node.id))
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._name(node.value)
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        is_module = isinstance(root, ast.Name) and root.id in self._names
        return _usual_name(f"{owner}.{node.attr}" if is_module or owner == "os.environ" else f".{node.attr}")

    def _place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self._file}:{node.lineno}"


def _usual_name(name: str) -> str:
    """Return the name by which an object is known that has others."""
    if name.startswith("trl."):  # its trainers move between its packages
        return f"trl.{name.rpartition('.')[2]}"
    for other, usual in _SAME:
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


_RANKS = frozenset({"rank", "global_rank", "local_rank", "world_rank", "get_rank", "get_world_rank", "get_local_rank"})
_OF_RANK_0 = frozenset(
    {"is_main_process", "is_local_main_process", "is_master", "is_main", "master_process", "is_rank_zero"}
    | {"is_world_process_zero", "is_global_zero"}
)


def _value(node: ast.expr, rank: int, assigned: dict[str, ast.expr]) -> Any:
    """Evaluate a condition such as `rank == 0` or `not is_main_process` for one rank; None if it depends on more."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=operation, operand=operand):
            value = _value(operand, rank, assigned)
            return None if value is None else -value if isinstance(operation, ast.USub) else not value
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return [_value(element, rank, assigned) for element in elements]
        case ast.BoolOp(op=operation, values=operands):
            values = [_value(operand, rank, assigned) for operand in operands]
            decides = isinstance(operation, ast.Or)
            is_decided = any(value is not None and bool(value) is decides for value in values)
            return decides if is_decided else None if None in values else not decides
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            return _compared(operation, _value(left, rank, assigned), _value(right, rank, assigned))
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            value = _value(inner, rank, assigned)
            return int(value) if isinstance(value, str) and value.isdecimal() else value
        case (
            ast.Subscript(slice=ast.Constant(value="RANK" | "LOCAL_RANK"))
            | ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(value="RANK" | "LOCAL_RANK"), *_])
        ):
            return str(rank)
        case ast.Call(func=ast.Name() | ast.Attribute() as called):
            return _value(called, rank, {})
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if name.lower() in _RANKS:
                return rank
            if name in _OF_RANK_0:
                return rank == 0
            if isinstance(node, ast.Name) and name in assigned:
                others = {other: value for other, value in assigned.items() if other != name}
                return _value(assigned[name], rank, others)
    return None


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _compared(operation: ast.cmpop, left: Any, right: Any) -> bool | None:
    compare = _COMPARISONS.get(type(operation))
    try:
        return None if compare is None or left is None or right is None else bool(compare(left, right))
    except TypeError:
        return None


def literal(value: ast.expr | None) -> Any:
    """Return the value of a literal; None if there is none."""
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def function_line(path: Path, name: str) -> int | None:
    """Return the line of a function at the top level of a module; None if there is no such module or function."""
    if not path.is_file():
        return None
    tree = _parsed(path, is_script=False)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node.lineno
    return None
