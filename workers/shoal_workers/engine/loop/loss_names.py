"""Which names of a function a loss is computed from, and are read before they are assigned: by its text alone.

    number = 0.0
    for x, y in run.batches(...):
        loss = criterion(model(x), y) * (1 + number)       reads criterion, model, x, y, number
        number = 0.9 * number + 0.1 * loss.item()          number: it has the value of the iteration before
        seen += len(x)                                     seen: nothing of the loss
        run.backward(loss)

A name may have dots: `self.state.number`. Called by `Carried`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_SINK = "backward"
_BATCHES = ("batches", "global_batches")
_GROUPS = "param_groups"
"""What is written there decides about the update."""
_Loop = ast.For | ast.AsyncFor | ast.While
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def read_by_loss(
    file: str, first_line: int, line: int, *, is_call: bool = False
) -> tuple[dict[str, int], bool, set[str]]:
    """Names, each with a line where it is read; whether a loop is around it; and the attributes that the function sets
    to something new.

    Args:
        first_line: of the function.
        line: which calls run.backward(), or with `is_call` a function that leads there.
    """
    function = _function_at(file, first_line)
    if function is None:
        return {}, True, set()
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _spans(node, line)]
    calls = [node for node in calls if is_call or (isinstance(node.func, ast.Attribute) and node.func.attr == _SINK)]
    arguments = [argument for call in calls for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    wanted = {name for read in (*arguments, *_tests(calls, parents)) for name in _names(read)}
    if not is_call:
        written = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign)]
        wanted |= {name for node in written if _writes_groups(node) for name in _names(node.value)}
    own = [] if isinstance(function, ast.Lambda) else function.body
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    batches = {name for node in assigned if _gives_batches(node.value) for name, _ in _targets(node)}
    above = [node for call in calls for node in _above(call, parents)]
    loop = next((node for node in above if isinstance(node, _Loop) and _is_of_steps(node, batches)), None)
    body, known = (own, _parameters(function)) if loop is None else (loop.body, {name for name, _ in _targets(loop)})
    given = {
        name.rpartition(".")[2]
        for node in assigned
        for name, whole in _targets(node)
        if whole and _is_new(name, node.value)
    }
    return _read_first(body, _sliced(function, wanted, parents), known), loop is not None, given


def _is_new(name: str, value: ast.expr) -> bool:
    """Return whether an attribute is set to what is not computed from it."""
    return "." in name and name not in _names(value)


def _gives_batches(value: ast.expr) -> bool:
    """Return whether run.batches() is in it."""
    return any(isinstance(node, ast.Attribute) and node.attr in _BATCHES for node in ast.walk(value))


def _is_of_steps(loop: _Loop, batches: set[str]) -> bool:
    """Return whether each iteration is another micro-batch or step, and not a part of one."""
    if isinstance(loop, ast.While):
        return any(isinstance(node, ast.Attribute) and node.attr == "step" for node in ast.walk(loop.test)) or (
            isinstance(loop.test, ast.Constant)
        )
    return _gives_batches(loop.iter) or not batches.isdisjoint(_names(loop.iter))


@cache
def read_by_result(file: str, first_line: int) -> dict[str, int]:
    """Names that the result of a function depends on, and that it has of elsewhere, each with a line."""
    function = _function_at(file, first_line)
    if function is None or isinstance(function, ast.Lambda):
        return {} if function is None else dict.fromkeys(_names(function.body), first_line)
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    results = [node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield) and node.value]
    values = [node.value for node in results if node.value is not None]
    wanted = {name for read in (*values, *_tests(results, parents)) for name in _names(read)}
    return _read_first(function.body, _sliced(function, wanted, parents), _parameters(function))


@cache
def _functions(file: str) -> dict[int, _Function]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    return {_first_line(node): node for node in reversed(functions)}


def _first_line(function: _Function) -> int:
    """Return the line with which its code object begins: that of its first decorator, if it has any."""
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return min([function.lineno, *(decorator.lineno for decorator in decorators)])


def _function_at(file: str, first_line: int) -> _Function | None:
    return _functions(file).get(first_line)


def _parameters(function: _Function) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return {parameter.arg for parameter in every if parameter.arg != "self"}


def _spans(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (above := parents.get(node)) is not None:
        yield above
        node = above


def _tests(nodes: Iterable[ast.AST], parents: dict[ast.AST, ast.AST]) -> list[ast.expr]:
    """Conditions of what is executed."""
    above = (outer for node in nodes for outer in _above(node, parents))
    return [outer.test for outer in above if isinstance(outer, ast.If | ast.While | ast.IfExp)]


def _writes_groups(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(part, ast.Attribute) and part.attr == _GROUPS for top in targets for part in ast.walk(top))


def _name(node: ast.AST) -> str:
    """`self.state` of such an expression; empty: it is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (name := _name(node.value)):
        return f"{name}.{node.attr}"
    return ""


def _names(node: ast.AST) -> Iterator[str]:
    if name := _name(node):
        yield name
        return
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _targets(node: ast.AST) -> list[tuple[str, bool]]:
    """What a statement or expression assigns, and whether as a whole."""
    tops: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        tops = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr) or (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        tops = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        tops = [item.optional_vars for item in node.items if item.optional_vars is not None]
    found = []
    while tops:
        top = tops.pop()
        if isinstance(top, ast.Tuple | ast.List):
            tops += top.elts
        elif isinstance(top, ast.Starred | ast.Subscript):
            found += [(name, isinstance(top, ast.Starred)) for name in list(_names(top.value))[:1]]
        elif name := _name(top):
            found.append((name, not isinstance(node, ast.AugAssign)))
    return found


def _covers(name: str, other: str) -> bool:
    return name == other or other.startswith(f"{name}.")


def _sliced(function: _Function, wanted: set[str], parents: dict[ast.AST, ast.AST]) -> set[str]:
    """All names that these depend on."""
    nodes = [(node, targets) for node in ast.walk(function) if (targets := _targets(node))]
    while True:
        found = set(wanted)
        for node, targets in nodes:
            if any(_covers(target, name) or _covers(name, target) for target, _ in targets for name in wanted):
                value = node.iter if isinstance(node, ast.For | ast.AsyncFor) else getattr(node, "value", None)
                values = [item.context_expr for item in node.items] if isinstance(node, ast.With) else [value]
                found |= {name for read in (*values, *_tests([node], parents)) if read for name in _names(read)}
        if found == wanted:
            return wanted
        wanted = found


def _read_first(body: Iterable[ast.stmt], wanted: set[str], assigned: set[str]) -> dict[str, int]:
    """Those of the names that are read before they are assigned."""
    found: dict[str, int] = {}

    def read(node: ast.AST | None, known: set[str]) -> None:
        for name in _names(node) if node is not None else ():
            if name in wanted and not any(_covers(other, name) for other in known):
                found.setdefault(name, getattr(node, "lineno", 0))

    def scan(statements: Iterable[ast.stmt], known: set[str]) -> bool:
        """Adds what is assigned for sure. Returns whether what follows is reached."""
        for node in statements:
            if isinstance(node, ast.If):
                read(node.test, known)
                branches = [(set(known), part) for part in (node.body, node.orelse)]
                reached = [assigned_there for assigned_there, part in branches if scan(part, assigned_there)]
                if not reached:
                    return False
                known |= set.intersection(*reached)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
                read(node.test if isinstance(node, ast.While) else node.iter, known)
                known |= {name for name, _ in _targets(node)}
                scan(node.body, known)  # it has iterations
                scan(node.orelse, set(known))
            elif isinstance(node, ast.With | ast.AsyncWith):
                for item in node.items:
                    read(item.context_expr, known)
                known |= {name for name, _ in _targets(node)}
                if not scan(node.body, known):
                    return False
            elif isinstance(node, ast.Try):
                for part in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                    scan(part, set(known))
                scan(node.body, known)
            elif isinstance(node, ast.Match):
                read(node.subject, known)
                for case in node.cases:
                    scan(case.body, set(known))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                known.add(node.name)
            else:
                targets = _targets(node)
                is_whole = bool(targets) and all(whole for _, whole in targets)
                read(getattr(node, "value", node) if is_whole else node, known)
                known |= {name for name, whole in targets if whole}
                if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                    return False
        return True

    scan(body, set(assigned))
    return found
