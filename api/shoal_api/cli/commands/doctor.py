"""`version`, which prints the versions, and `doctor`, which checks this machine and the server for what would make a
job fail.

Probes measure, and functions `judge_*` turn what they measured into findings. torch, Ray and gloo run in separate
processes: a broken one must not crash the doctor, and the command line never loads them. Nothing is changed: a database
is tried as it is, and migrating an older schema is the task of the server.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.session import ExitCode, Output, Session, command
from shoal_service.core.quantities import size_text
from shoal_workers.contract import Frozen
from shoal_workers.machine_limits import available_bytes
from shoal_workers.version import VERSION


@command()
def doctor(
    session: Session,
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="Check this database instead of the configured one.")
    ] = None,
) -> None:
    """Check this machine and the server. Exit code 1 if something would prevent jobs from running."""
    colours = {Verdict.OK: "good", Verdict.WARN: "warn", Verdict.FAIL: "bad"}
    findings: list[Finding] = []
    for finding in examine(session.output, list_checks(session.url, database_url)):
        findings.append(finding)
        if not session.output.as_json:
            session.output.line(
                finding, f"{finding.verdict:<5} {finding.check}: {finding.message}", colours[finding.verdict]
            )
            if finding.hint:
                session.output.line(finding, f"      {finding.hint}", "dim")
    verdict = find_worst(findings)
    works = "cannot" if verdict is Verdict.FAIL else "can"
    session.show({"verdict": verdict, "findings": findings}, f"jobs {works} run on this machine")
    if verdict is Verdict.FAIL:
        raise typer.Exit(ExitCode.FAILED)


def examine(output: Output, checks: Iterable[tuple[str, Callable[[], Finding]]]) -> Iterator[Finding]:
    """Run the checks one after the other. Some take many seconds, so each is named before it begins."""
    for name, check in checks:
        with output.working(f"checking {name} ..."):
            finding = check()
        yield finding


@command(url=False)
def version(session: Session) -> None:
    """Print the versions of Shoal, Ray, torch and Python."""
    versions: dict[str, str | None] = {"shoal": VERSION}
    for name in ("ray", "torch"):
        try:
            versions[name] = installed(name)
        except PackageNotFoundError:
            versions[name] = None
    versions["python"] = sys.version.split()[0]
    lines = [f"{name} {number or 'not installed'}" for name, number in versions.items()]
    session.show(versions, "\n".join(lines))


GIB = 1024**3
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
"""The newest release that has been tested: docs/install.md has the result."""
_WANTED = {"torch": ("2.13", "2.14", "2.15"), "ray": ("2.57", "2.58", "2.59", "2.60")}
"""The releases with which `make test-versions` has passed; pyproject.toml has the same ranges."""
_IMPORT_TIMEOUT_S = 120.0
_GLOO_TIMEOUT_S = 90.0
_GLOO_RANK = """
import datetime, sys, torch, torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
limit = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=limit)
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.destroy_process_group()
"""
_SQLITE = "sqlite:///"


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, with a restriction."""
    FAIL = "fail"
    """Jobs cannot run here."""


class Finding(Frozen):
    """One line of the report."""

    check: str
    verdict: Verdict
    message: str
    hint: str = ""
    """What to do; empty if nothing is needed."""


def find_worst(findings: Iterable[Finding]) -> Verdict:
    order = [Verdict.OK, Verdict.WARN, Verdict.FAIL]
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def list_checks(url: str, database_url: str | None) -> tuple[tuple[str, Callable[[], Finding]], ...]:
    """Return all checks with their names, in the order in which they are to run; the slow ones come last."""
    return (
        ("python", lambda: judge_python(sys.version_info[:2], sys.version.split()[0])),
        ("memory", _memory),
        ("disk", _disk),
        ("shared memory", _shared_memory),
        ("ports", _port),
        ("ray auth", _ray_auth),
        ("database", lambda: try_database(database_url)),
        ("server", lambda: judge_server(url)),
        ("ray", lambda: _library("ray")),
        ("torch", lambda: _library("torch")),
        ("gloo", _gloo),
    )


def _memory() -> Finding:
    try:
        free_bytes = available_bytes()
    except OSError:  # a system without /proc
        free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return judge_space(
        "memory",
        "memory",
        free_bytes,
        fail_below_gib=1.0,
        warn_below_gib=4.0,
        hint="a worker needs about 0.5 GiB besides its model; the demo has four workers",
    )


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    return judge_space(
        "disk",
        f"in {folder}",
        shutil.disk_usage(folder).free,
        fail_below_gib=0.5,
        warn_below_gib=4.0,
        hint="free some space, or set TMPDIR to a larger disk; Ray stops writing when a disk is 95 % full",
    )


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding(check="shared memory", verdict=Verdict.OK, message="no /dev/shm on this system; Ray uses files")
    return judge_space(
        "shared memory",
        "in /dev/shm",
        shutil.disk_usage("/dev/shm").free,
        fail_below_gib=0.05,
        warn_below_gib=1.0,
        hint="a container can get more: docker run --shm-size=2g",
    )


def _port() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Finding(check="ports", verdict=Verdict.OK, message=f"loopback works (tried port {port})")
    except OSError as error:
        return Finding(
            check="ports",
            verdict=Verdict.FAIL,
            message=f"no connection over 127.0.0.1: {error}",
            hint="check whether a firewall or a sandbox blocks loopback connections",
        )


def _ray_auth() -> Finding:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    source = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(path) if path.is_file() else None
    return judge_ray_auth(os.environ.get("RAY_AUTH_MODE"), source)


def judge_server(url: str) -> Finding:
    import httpx

    from shoal_api.cli.readiness import read_readiness
    from shoal_api.client import Disconnected

    try:
        answer = read_readiness(url)
    except (Disconnected, httpx.InvalidURL) as error:
        return Finding(
            check="server",
            verdict=Verdict.WARN,
            message=f"no server at {url} ({getattr(error, 'cause', error)})",
            hint="start one with `shoal serve`, or set its address with --url or SHOAL_URL",
        )
    if isinstance(answer, str):
        return Finding(
            check="server",
            verdict=Verdict.WARN,
            message=f"{url} answers, but is not ready",
            hint=f"it waits for {answer}",
        )
    if answer.warnings:
        message = f"{url} is ready, with warnings"
        return Finding(check="server", verdict=Verdict.WARN, message=message, hint=" ".join(answer.warnings))
    return Finding(check="server", verdict=Verdict.OK, message=f"{url} is ready")


def _library(name: str) -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}; print({name}.__version__)"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return judge_library(name, None, f"the import took longer than {_IMPORT_TIMEOUT_S:g} s")
    if done.returncode:
        return judge_library(name, None, _last_line(done.stderr) or f"exit code {done.returncode}")
    return judge_library(name, _last_line(done.stdout), "")


def _gloo() -> Finding:
    """Two ranks on this machine run an all-reduce, as the workers of a job do."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _GLOO_RANK, str(rank), f"{folder}/store"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        try:
            problems = [_last_line(rank.communicate(timeout=_GLOO_TIMEOUT_S)[1]) for rank in ranks]
        except subprocess.TimeoutExpired:
            problems = [f"not done after {_GLOO_TIMEOUT_S:g} s"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    if any(rank.returncode for rank in ranks):
        return Finding(
            check="gloo",
            verdict=Verdict.FAIL,
            message=f"all-reduce of two ranks failed: {next(filter(None, problems), '')}",
            hint="if the host name does not resolve, set GLOO_SOCKET_IFNAME=lo",
        )
    return Finding(
        check="gloo",
        verdict=Verdict.OK,
        message=f"all-reduce of two ranks works ({time.monotonic() - began:.1f} s with imports)",
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def judge_python(version: tuple[int, int], shown: str) -> Finding:
    if version < OLDEST_PYTHON:
        return Finding(
            check="python", verdict=Verdict.FAIL, message=f"Python {shown}", hint="Shoal needs 3.11 or newer"
        )
    if version > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return Finding(
            check="python",
            verdict=Verdict.WARN,
            message=f"Python {shown}",
            hint=f"Shoal was tried with 3.11 to {newest}",
        )
    return Finding(check="python", verdict=Verdict.OK, message=f"Python {shown}")


def judge_space(
    check: str, what: str, free_bytes: int, *, fail_below_gib: float, warn_below_gib: float, hint: str
) -> Finding:
    """Compare the free memory, disk or shared memory with two limits."""
    message = f"{size_text(free_bytes)} free {what}"
    if free_bytes < fail_below_gib * GIB:
        return Finding(
            check=check, verdict=Verdict.FAIL, message=message, hint=f"{hint} (needs {fail_below_gib:g} GiB)"
        )
    if free_bytes < warn_below_gib * GIB:
        return Finding(check=check, verdict=Verdict.WARN, message=message, hint=hint)
    return Finding(check=check, verdict=Verdict.OK, message=message)


def judge_library(name: str, version: str | None, problem: str) -> Finding:
    """Judge the `version` of a library that was imported in a separate process; None if the import failed."""
    desired = _WANTED[name]
    if version is None:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            message=f"{name} cannot be imported: {problem}",
            hint="install Shoal with its dependencies again: `make setup`, or `pip install shoal`",
        )
    if not any(f"{version}.".startswith(f"{release}.") for release in desired):
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            message=f"{name} {version}",
            hint=f"Shoal needs {name} {' or '.join(desired)}, because it uses internals that differ between versions",
        )
    return Finding(check=name, verdict=Verdict.OK, message=f"{name} {version}")


def judge_ray_auth(mode: str | None, token_source: str | None) -> Finding:
    """Judge how Ray authenticates. `token_source` is where a token was found: Ray requires one to join a protected
    cluster."""
    if mode == "token" and token_source is None:
        return Finding(
            check="ray auth",
            verdict=Verdict.FAIL,
            message="RAY_AUTH_MODE=token, but there is no token",
            hint="set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or generate one: ray get-auth-token --generate",
        )
    if mode is None:
        return Finding(
            check="ray auth",
            verdict=Verdict.OK,
            message=f"RAY_AUTH_MODE is not set; token {'from ' + token_source if token_source else 'none'}",
            hint="for a protected cluster (serve --ray-address) set RAY_AUTH_MODE=token and the token's path",
        )
    return Finding(
        check="ray auth", verdict=Verdict.OK, message=f"RAY_AUTH_MODE={mode}, token {token_source or 'not needed'}"
    )


def try_database(url: str | None) -> Finding:
    """Connect to the database. `url`: None for the one that `shoal serve` would use."""
    from shoal_service.problems import SettingsError
    from shoal_service.settings import load_settings
    from shoal_service.store import Store, StoreUnavailable
    from shoal_service.store.database import Database

    try:
        tried = url or load_settings().database_url
        if tried.startswith(_SQLITE) and not Path(tried.removeprefix(_SQLITE)).exists():
            return judge_new_file(Path(tried.removeprefix(_SQLITE)))
        store = Store(Database(tried))
        try:
            store.ping()
        finally:
            store.close()
    except (SettingsError, StoreUnavailable) as error:
        return Finding(
            check="database", verdict=Verdict.FAIL, message=" ".join(str(error).split()), hint="set --database-url"
        )
    return Finding(check="database", verdict=Verdict.OK, message=f"{tried.partition(':')[0]} answers")


def judge_new_file(path: Path) -> Finding:
    """Judge whether a SQLite file that does not exist yet could be created."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if folder.is_dir() and os.access(folder, os.W_OK):
        return Finding(check="database", verdict=Verdict.OK, message=f"a new SQLite file can be created in {folder}")
    return Finding(
        check="database",
        verdict=Verdict.FAIL,
        message=f"{folder} is not a writable directory",
        hint="give another --state-dir or --database-url",
    )
