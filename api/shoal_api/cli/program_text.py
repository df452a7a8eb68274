"""Reads what a Python program uses, from its text and that of the modules beside it that it imports. Nothing is
imported or run.

`read_text` finds calls by their full names, so that `DDP(model)` is found under every name that it was imported as.
What is not found may still be there: a name made at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from shoal_api.cli.session import CliError

_MAX_FILES = 200
TRAINERS = (
    *("transformers.Trainer", "transformers.Seq2SeqTrainer", "lightning.Trainer"),
    *(f"trl.{kind}Trainer" for kind in ("SFT", "DPO", "GRPO", "PPO", "RLOO", "KTO", "ORPO", "CPO", "Reward")),
)
"""Trainers that have the loop, and save and resume by themselves."""


class Kind(Enum):
    """How a program uses a name or a text."""

    CALL = auto()
    BASE = auto()
    """A class has it as a base; the last part of its name."""
    READ = auto()
    """An attribute is read."""
    TEXT = auto()
    """A literal text."""
    WRITE = auto()
    """A key is assigned in os.environ."""


@dataclass(frozen=True, slots=True)
class Use:
    """A place of a program that uses a name or a text."""

    kind: Kind
    name: str
    """Full name; `.backward` for a method of an object whose class is not known."""
    place: str
    """`train.py:12`."""
    keywords: dict[str, ast.expr] = field(default_factory=dict)
    """The keywords of a call."""
    args: tuple[ast.expr, ...] = ()
    """The positional arguments of a call."""


@dataclass
class ProgramText:
    """What a program uses, in the order of its lines."""

    uses: list[Use] = field(default_factory=list)
    trainers: dict[str, str] = field(default_factory=dict)
    """Names of classes whose base is one of TRAINERS, and that base."""
    texts_by_name: dict[str, str] = field(default_factory=dict)
    """What is assigned to variables, or what it begins with."""
    num_files: int = 0

    def calls_made(self) -> list[Use]:
        return [use for use in self.uses if use.kind is Kind.CALL]

    def places(self, kind: Kind, *names: str) -> tuple[str, ...]:
        """Return where one of these names is used. One that begins with a dot is a method of any object, and one that
        ends with a dot stands for everything in a package."""
        methods = tuple(name for name in names if name.startswith("."))
        packages = tuple(name for name in names if name.endswith("."))
        return tuple(
            use.place
            for use in self.uses
            if use.kind is kind and (use.name in names or use.name.endswith(methods) or use.name.startswith(packages))
        )

    def calls(self, *names: str) -> tuple[str, ...]:
        """Return where one of these is called, with names as of `places`."""
        return self.places(Kind.CALL, *names)

    def find_keywords(self, *names: str) -> dict[str, ast.expr]:
        """Return the keywords of the only call of one of these; {} if there are several, which may differ."""
        calls = [call for call in self.calls_made() if call.name in names]
        return calls[0].keywords if len(calls) == 1 else {}

    def keywords(self, *names: str) -> tuple[str, ...]:
        """Return where a call has one of these keywords, with a value."""
        return tuple(use.place for use in self.uses if any(is_given(use.keywords.get(name)) for name in names))

    def mentions(self, text: str) -> bool:
        return any(text in use.name for use in self.uses if use.kind is Kind.TEXT)

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

    def first_gpus(self) -> tuple[str, ...]:
        """Return where the first GPU of a node is named, whatever the rank."""
        by_call = (
            call.place
            for call in self.calls_made()
            if (call.name.endswith((".cuda", "torch.cuda.set_device")) and _is_zero(call.args[:1]))
            or (call.name == "torch.device" and _is_zero(call.args[1:2]))
        )
        return tuple(dict.fromkeys([*self.places(Kind.TEXT, "cuda:0"), *by_call]))


def is_given(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value in (None, False))


def _is_zero(values: Sequence[ast.expr]) -> bool:
    return any(isinstance(item, ast.Constant) and item.value == 0 and item.value is not False for item in values)


def read_text(script: Path, directory: Path) -> ProgramText:
    """Read a script, and the modules below `directory` or beside it that it imports.

    Raises:
        CliError: it is not valid Python.
    """
    program = ProgramText()
    roots = [script.resolve().parent, directory.resolve()]
    left, seen = [script.resolve()], {script.resolve()}
    while left and program.num_files < _MAX_FILES:
        path = left.pop(0)
        visitor = _Visitor(program, relative_path(path, directory))
        tree = _parse(path, is_script=not program.num_files)
        program.num_files += 1
        if tree is None:
            continue
        visitor.visit(tree)
        files = [file for name in visitor.imported for file in _find_local_files(name, path, roots)]
        left += [file for file in dict.fromkeys(files) if file not in seen]
        seen.update(files)
    program.uses = [
        replace(use, name=program.trainers.get(use.name.rpartition(".")[2], use.name)) if use.kind is Kind.CALL else use
        for use in program.uses
    ]
    return program


def _parse(path: Path, *, is_script: bool) -> ast.Module | None:
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


def _find_local_files(name: str, path: Path, roots: Iterable[Path]) -> Iterator[Path]:
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

    def __init__(self, program: ProgramText, file: str) -> None:
        self._program = program
        self._file = file
        self._names: dict[str, str] = {}
        self.imported: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.append(alias.name)
            package = alias.name.partition(".")[0]
            self._names[alias.asname or package] = alias.name if alias.asname else package

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
        name = self._name(node.func)
        self._add(Kind.CALL, name, node, keywords, tuple(node.args))
        if name == "os.environ.update":
            self._add_writes(node, *node.args)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._name(node.target) == "os.environ":
            self._add_writes(node, node.value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._program.texts_by_name[target.id] = self._program.text(node.value)
                if self._name(node.value) == "os.environ":
                    self._names[target.id] = "os.environ"
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = self._name(base)
            last = name.rpartition(".")[2]
            self._add(Kind.BASE, last, node)
            name = self._program.trainers.get(last, name)
            if name in TRAINERS:
                self._program.trainers[node.name] = name
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add(Kind.READ, self._name(node), node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(Kind.TEXT, node.value, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = node.slice
        if isinstance(node.ctx, ast.Store) and isinstance(key, ast.Constant) and self._name(node.value) == "os.environ":
            self._add(Kind.WRITE, str(key.value), node)
        self.generic_visit(node)

    def _add(self, kind: Kind, name: str, node: ast.expr | ast.stmt, *call: Any) -> None:
        self._program.uses.append(Use(kind, name, f"{self._file}:{node.lineno}", *call))

    def _add_writes(self, node: ast.expr | ast.stmt, *given: ast.expr) -> None:
        """Add the keys of what is written into the environment: keywords, `{...}` or `dict(...)`."""
        for value in (node, *given):
            keys = value.keys if isinstance(value, ast.Dict) else value.keywords if isinstance(value, ast.Call) else []
            for key in keys:
                name = key.arg if isinstance(key, ast.keyword) else getattr(key, "value", None)
                self._add(Kind.WRITE, str(name), node)

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


def _usual_name(name: str) -> str:
    """Return the name by which an object is known that has others."""
    if name.startswith("trl."):  # its trainers move between its packages
        return f"trl.{name.rpartition('.')[2]}"
    for other, usual in _SAME:
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


def literal(value: ast.expr | None) -> Any:
    """Return the value of a literal; None if there is none."""
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def find_function_line(path: Path, name: str) -> int | None:
    """Return the line of a function at the top level of a module; None if there is no such module or function."""
    if not path.is_file():
        return None
    tree = _parse(path, is_script=False)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node.lineno
    return None
