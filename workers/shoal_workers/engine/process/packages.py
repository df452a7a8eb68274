"""Installs the packages of `code.pip` once per node, and lets this process import them.

    worker 0 of a node | lock | pip: what is missing? | pip install --target | rename | sys.path
    worker 1           | waits for the lock ................................ | sys.path

The directory is named by a hash of the list, the wheels and the interpreter, so jobs that ask for the same share it;
`package_sets` knows who uses it. It is never changed after the rename. pip first says what it would install beside what
the interpreter has: packages that are installed already are not installed twice, and those that this process has
imported keep their version. Called by the engine on the training thread, before the task is imported.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from shoal_workers.contract.user_code import CodeSpec
from shoal_workers.node_lock import node_lock
from shoal_workers.package_sets import hold, root_of_node

_held: dict[Path, IO[bytes]] = {}
"""The locks that show that this process uses its packages; until it ends."""
_holding = threading.Lock()
_MISSING = re.compile(r"(?:No matching distribution found for|satisfies the requirement) ([^\s(;]+)")
_CONFLICT = re.compile(r"Cannot install (.+?) because")
_MAX_ERROR = 600


class PackagesNotInstalled(RuntimeError):
    """pip refused; the message names the package and the way out. A fault of the spec, not of the engine."""


def add_packages(code: CodeSpec, note: Callable[[str], None], root: Path | None = None) -> Path | None:
    """The directory that was added to `sys.path` and PYTHONPATH; None if the spec names no packages. Idempotent.

    Raises:
        PackagesNotInstalled
    """
    if not code.pip:
        return None
    directory = installed(code, note, root or root_of_node())
    if str(directory) not in sys.path:
        before = next((at for at, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
        sys.path.insert(before, str(directory))  # after the job's own code, before what the interpreter has
        known = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, str(directory))))
        importlib.invalidate_caches()
    return directory


def installed(code: CodeSpec, note: Callable[[str], None], root: Path) -> Path:
    """Raises PackagesNotInstalled."""
    key = _key(code)
    directory = root / key
    root.mkdir(parents=True, exist_ok=True)
    with _holding:
        if directory not in _held:
            _held[directory] = hold(root, key, lambda _: note("packages that were not used for long are being removed"))
            atexit.register(_held[directory].close)
    if directory.is_dir():
        return directory

    def wait(text: str) -> None:
        note(f"another worker of this node installs packages{': ' if text else ''}{text}")

    with node_lock(directory.with_suffix(".lock"), wait) as say:
        if not directory.is_dir():
            message = f"installing {', '.join(code.pip)}"
            note(message)
            say(message)
            _install(code, directory)
    return directory


def _install(code: CodeSpec, directory: Path) -> None:
    work = directory.with_suffix(".installing")
    shutil.rmtree(work, ignore_errors=True)  # of a process that died; the lock is ours
    (work / "target").mkdir(parents=True)
    try:
        report, held = work / "report.json", work / "held.txt"
        held.write_text("".join(f"{module_name}\n" for module_name in _imported()), encoding="utf-8")
        _pip(code, ["--dry-run", "--report", str(report), "--constraint", str(held)], code.pip)
        plan = json.loads(report.read_text(encoding="utf-8"))["install"]
        exact = [f"{requirement['metadata']['name']}=={requirement['metadata']['version']}" for requirement in plan]
        if exact:
            _pip(code, ["--no-deps", "--target", str(work / "target")], exact)
        # In one step, because other workers take a directory of this name as complete.
        (work / "target").rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip(code: CodeSpec, options: Sequence[str], requirements: Sequence[str]) -> None:
    source = [] if code.wheels is None else ["--no-index", "--only-binary", ":all:", "--find-links", code.wheels]
    shared = ["--disable-pip-version-check", "--no-input"]
    command = [*_pip_command(), "install", *shared, *source, *options, "--", *requirements]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode:
        raise PackagesNotInstalled(_describe_failure(code, f"{ran.stderr}\n{ran.stdout}"))


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    import ensurepip

    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        raise PackagesNotInstalled(
            f"code.pip: the interpreter of the workers ({sys.executable}) has no pip. Install it on the nodes."
        )
    return [sys.executable, str(bundled[-1] / "pip")]


def _describe_failure(code: CodeSpec, output: str) -> str:
    lines = output.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    causes = [line.strip() for line in lines if " depends on " in line or "requested (constraint)" in line]
    conflict, missing = _CONFLICT.search(output), _MISSING.search(output)
    said = "; ".join(dict.fromkeys(causes if conflict and causes else errors or [output.strip()]))[:_MAX_ERROR]
    if conflict:
        package = conflict[1]
        hint = (
            "A constraint is the version of a package that the workers have loaded already: choose another version of "
            "yours."
        )
    elif missing:
        package = missing[1]
        python = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform} {platform.machine()}"
        hint = f"Put a wheel of it for {python} into the directory, on every node."
        if code.wheels is None:
            hint = f"Check its name and version, that it exists for {python}, and that the nodes reach pip's index."
    else:
        package, hint = ", ".join(code.pip), "See pip's words."
    where = f"code.wheels {code.wheels}" if code.wheels is not None else "pip's index"
    return f"code.pip: {package} cannot be installed from {where}: {said.rstrip('.')}. {hint}"


def _imported() -> list[str]:
    """NAME==VERSION of the distributions of which this process has imported something: it cannot use another one."""
    by_module = importlib.metadata.packages_distributions()
    modules = {module.partition(".")[0] for module in list(sys.modules)}
    names = {name for module in modules for name in by_module.get(module, ())}
    return sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)


def _key(code: CodeSpec) -> str:
    wheels: list[tuple[str, int, int]] = []
    if code.wheels is not None:
        try:
            entries = [(entry.name, entry.stat()) for entry in os.scandir(code.wheels) if entry.name.endswith(".whl")]
        except OSError as error:
            raise PackagesNotInstalled(
                f"code.wheels {code.wheels} cannot be read on this node: {error.strerror}. It must be there on every "
                "node that runs a worker of the job."
            ) from None
        wheels = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in entries)
    decides = (sorted(code.pip), code.wheels, wheels, sys.prefix, platform.python_version())
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
