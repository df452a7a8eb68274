"""Which tests reach which statement.

coverage.py cannot tell it here: its contexts do not follow into child processes, and a worker that a test kills writes
no data. So the tests run in a copy of the tree in which a probe stands before each statement of the drawn modules. A
probe sets one byte of a file that every process of the test maps into its memory: forks, new interpreters, actors of
Ray and the server from the wheel, also if they are killed in the next moment. Nothing has to be inherited, as the name
of the file is written into the copy. The pytest process clears the bytes before each test and reads them after it.

The map is a file of JSON lines, one for each test. It can be made in pieces, and goes on where it was interrupted.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from injected_faults.sources import ROOMS, ROOT, copy_tree, hash_sources, iterate_statements, list_modules

PIECES = (
    "tests/unit/service",
    "tests/unit/workers",
    "tests/unit/doubles",
    "tests/unit/api",
    "tests/store",
    "tests/http",
    "tests/dist",
    "tests/ray",
    "tests/chaos",
)
"""Folders whose tests run the product, the cheap ones first."""
BUILD = ROOT / "build" / "faults"
_PROBES = "workers/shoal_workers/statement_probes.py"
_PROBES_SOURCE = '''"""A byte for each statement, shared by all processes."""

import mmap


def _map():
    try:
        with open({file!r}, "r+b") as file:
            return mmap.mmap(file.fileno(), {size})
    except OSError:  # code of a job may not be allowed to see the file
        return bytearray({size})


reached = _map()
'''


@dataclass(frozen=True)
class ReachingTest:
    """One test, and what it reaches."""

    name: str
    seconds: float
    is_first_tier: bool
    passed: bool
    statements: int
    """A bit for each statement of all modules: bit n is the n-th of `number_statements`."""

    @property
    def folder(self) -> str:
        return self.name.split("/")[1]


def number_statements() -> dict[str, int]:
    """Module -> the number of its first statement among those of all modules; "" -> how many there are."""
    numbers, total = {}, 0
    for path in (path for room in ROOMS for path in list_modules(room)):
        numbers[path] = total
        total += sum(1 for _ in iterate_statements(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    return {**numbers, "": total}


def add_probes(source: str, first: int) -> str:
    """The source text with a probe before each statement inside a function. Comments and line numbers are lost."""
    tree = ast.parse(source)
    numbers = {id(statement): first + n for n, statement in enumerate(iterate_statements(tree))}
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [part for statement in body for part in _with_probe(statement, numbers)])
    imports = ast.parse("from shoal_workers.statement_probes import reached as _reached_statements").body
    is_head = [
        isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Expr)
        else getattr(node, "module", "") == "__future__"
        for node in tree.body
    ]
    head = is_head.index(False) if False in is_head else len(is_head)
    tree.body[head:head] = imports
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _with_probe(statement: ast.stmt, numbers: dict[int, int]) -> Iterator[ast.stmt]:
    if id(statement) in numbers:
        yield from ast.parse(f"_reached_statements[{numbers[id(statement)]}] = 1").body
    yield statement


def map_path() -> Path:
    return BUILD / f"map-{hash_sources()}.jsonl"


def make_map(folders: Sequence[str], marks: str, options: Sequence[str] = ()) -> None:
    """Runs the tests of the folders that are not in the map yet, and adds them."""
    numbers = number_statements()
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-reach-") as directory:
        tree, probes = Path(directory, "tree"), Path(directory, "probes")
        copy_tree(tree)
        for path, first in numbers.items():
            if path:
                module = tree / path
                module.write_text(add_probes(module.read_text(encoding="utf-8"), first), encoding="utf-8")
        probes.write_bytes(bytes(numbers[""]))
        for path, mode in ((Path(directory), 0o755), (probes, 0o666)):  # jobs can run as other users
            path.chmod(mode)
        source = _PROBES_SOURCE.format(file=str(probes), size=numbers[""])
        (tree / _PROBES).write_text(source, encoding="utf-8")
        environment = tree_environment(tree) | {"SHOAL_FAULTS_PROBES": str(probes), "SHOAL_FAULTS_MAP": str(map_path())}
        command = [sys.executable, "-m", "pytest", "-p", "injected_faults.plugins.record", "-m", marks]
        subprocess.run([*command, *options, *folders], cwd=tree, env=environment, check=False)


def tree_environment(tree: Path) -> dict[str, str]:
    """The environment in which Python imports the product and the plugins from a copy of the tree."""
    names = ("api", "service", "workers", "tools")
    without = "PYTHONDONTWRITEBYTECODE"  # else each process would compile the product
    return {
        **{name: value for name, value in os.environ.items() if name != without},
        "PYTHONPATH": os.pathsep.join(str(tree / name) for name in names),
        "OMP_NUM_THREADS": "1",
    }


def read_map() -> list[ReachingTest]:
    """The tests that have passed when the map was made."""
    if not map_path().exists():
        return []
    tests = {}
    for line in map_path().read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        tests[test["name"]] = ReachingTest(**{**test, "statements": int(test["statements"], 16)})
    return [test for test in tests.values() if test.passed]
