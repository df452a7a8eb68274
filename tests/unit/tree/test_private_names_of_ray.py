"""One module has all names of Ray that are not a part of its public interface, and says of each why."""

from __future__ import annotations

import ast
import re

from kit.sources import PRODUCT, ROOT, relative, sources
from shoal_workers import ray_internals
from shoal_workers.forkserver import idle, launch

HOME = ROOT / "workers" / "shoal_workers" / "ray_internals.py"
_PACKAGES = (
    *("ray._", "ray.core", "ray.experimental", "ray.scripts", "ray.dashboard", "ray.cluster_utils"),
    *("ray.train.v2", "ray.train._", "ray.data._", "ray.air._"),
)
_TEXTS = (
    *_PACKAGES,
    "ray::",
    "--raylet-name",
    "RAY_RAYLET_PID",
    "_ray_pkg_",
    "checkpoint_manager_snapshot",
    "validate_storage_marker",
)
_ATTRIBUTES = frozenset({"_actor_id", "_ray_actor_id", "_private", "_raylet", "_datasets_to_split", "_iter_batches"})
_CANNOT_IMPORT_IT = {
    "workers/shoal_workers/forkserver/launch.py": "--raylet-name=",
    "workers/shoal_workers/forkserver/idle.py": "ray::",
    "service/shoal_service/cluster/embedded_node.py": "ray.scripts.scripts",
    "service/shoal_service/core/attempt/scripts.py": "_ray_pkg_",
}
"""Programs that run before the package can be imported, or never import Ray; and the text that each has of its own."""
_SUSPECT = re.compile(rf"\bfrom ray[. ]|{'|'.join(map(re.escape, (*_TEXTS, *_ATTRIBUTES)))}")


def _private_names(text: str) -> list[tuple[int, str]]:
    """Line and name of each."""
    tree = ast.parse(text)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names if f"{alias.name}.".startswith(_PACKAGES)]
            case ast.ImportFrom(module=str(module)):
                imported = [f"{module}.{alias.name}" for alias in node.names]
                names = [name for name in imported if name.startswith(_PACKAGES)]
            case ast.Attribute(attr=name) if name in _ATTRIBUTES:
                names = [name]
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names = [text for part in _TEXTS if part in text]
            case ast.Constant(value=bytes(raw)):
                names = [raw.decode(errors="replace") for part in _TEXTS if part.encode() in raw]
        found += [(node.lineno, name) for name in names]  # type: ignore[attr-defined]
    return found


def test_no_other_module_uses_a_private_name_of_ray() -> None:
    allowed = {ROOT / name: text for name, text in _CANNOT_IMPORT_IT.items()}
    found = [
        f"{relative(path)}:{line}: {name}"
        for path, text in sources(*PRODUCT).items()
        if path != HOME and _SUSPECT.search(text)
        for line, name in _private_names(text)
        if path not in allowed or allowed[path] not in name
    ]
    assert found == []


def test_programs_that_run_before_the_package_look_for_the_same_texts() -> None:
    assert launch._RAYLET_SOCKET == ray_internals.RAYLET_SOCKET_OPTION
    assert idle._IDLE == ray_internals.IDLE_TITLE and idle._IDLE.startswith(ray_internals.PROCESS_TITLE)


def _public_texts() -> list[tuple[str, str]]:
    body = ast.parse(HOME.read_text(encoding="utf-8")).body
    texts = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            texts.append((node.name, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            texts.append((node.targets[0].id, str(following.value.value) if has_text else ""))  # type: ignore[union-attr]
    return texts


def test_each_says_why_what_doing_without_would_cost_and_what_is_public() -> None:
    unexplained = [
        name
        for name, text in _public_texts()
        if not all(part in text for part in ("Why:", "Without:", "Public:"))
        and "Why, Without, Public: as of " not in text
    ]
    assert unexplained == []
