"""Private names of torch are in one module, where each says why it is used and what would replace it."""

import ast
import re
from collections.abc import Iterator

from kit.sources import ROOT, relative, sources

INTERNALS = ROOT / "workers" / "shoal_workers" / "torch_internals.py"
_STANDARD = {"os", "sys", "functools", "multiprocessing.current_process()"}
"""Parts of the standard library of which private names are used: `os._exit`, `sys._getframe`."""
_DOCUMENTED = ("_foreach_",)
"""Prefixes of functions that torch's reference documents under a name with an underscore."""
_BY_NAME = ("getattr", "hasattr", "setattr")
_SUSPECT = re.compile(
    r"""(?<!self)(?<!cls)\._[a-zA-Z]|["']_[a-zA-Z]|^\s*from torch[\w.]* import (?:\([^)]*|[^\n]*)\b_""", re.M
)
"""A file without any of these has no private name of torch."""


def _widely_used() -> set[str]:
    tree = ast.parse(INTERNALS.read_text(encoding="utf-8"))
    [names] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["WIDELY_USED"]
    ]
    return {one.value for one in ast.walk(names) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.startswith(_DOCUMENTED)


def _defined(tree: ast.Module) -> set[str]:
    """Private names of the module's own classes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
    return found


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private modules and names of torch that are imported, and private attributes of what is not the module's own."""
    own = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            yield from (part for alias in node.names for part in f"{node.module}.{alias.name}".split("."))
        elif isinstance(node, ast.Import):
            yield from (part for one in node.names if one.name.startswith("torch.") for part in one.name.split("."))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            root = ast.unparse(node.value)
            if root not in _STANDARD and not root.endswith("aten"):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value not in own and name.value != "_module_fqn":  # of stacks.py
                yield str(name.value)


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    found: dict[str, set[str]] = {}
    allowed = _widely_used()
    for path, text in sources("workers/shoal_workers").items():
        if path not in (INTERNALS, INTERNALS.with_name("ray_internals.py")) and _SUSPECT.search(text):
            found[relative(path)] = {name for name in _private_names(ast.parse(text)) if _is_private(name)} - allowed
    assert {path: names for path, names in found.items() if names} == {}, (
        "put it into torch_internals.py, with why, what it would cost to do without, and what is public"
    )


def test_the_test_sees_private_names() -> None:
    assert {"_C", "_world", "_getframe", "_spec"} & {
        name
        for text in ("import torch._C", "dist._world.pg_map", "tensor._spec", "import sys; sys._getframe()")
        for name in _private_names(ast.parse(text))
        if _is_private(name)
    } == {"_C", "_world", "_spec"}
