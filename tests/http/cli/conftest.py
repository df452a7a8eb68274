"""A real server over a real store, in a thread. The tests write reports into the store as a supervisor does."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kit.databases import MigratedDatabases
from kit.worlds.written_service import SPEC, Service, written_service
from shoal_api.cli.main import build_app
from shoal_api.cli.session import Output, Session

_ALSO_ON_POSTGRES = ("test_cli_accounts", "test_cli_checkpoints", "test_cli_jobs", "test_cli_queue")


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Shoal:
    """Runs commands in this process, with separate standard output and standard error."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, *arguments: str, stdin: str | None = None, columns: int = 200) -> Ran:
        environment = {"SHOAL_URL": self._url, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
        with CliRunner().isolation(input=stdin, env=environment) as (out, err, _):
            with pytest.raises(SystemExit) as ended:
                _command().main(args=list(arguments), prog_name="shoal")
            sys.stdout.flush()
            sys.stderr.flush()
            code = ended.value.code
            assert isinstance(code, int), code
            return Ran(code, out.getvalue().decode(), err.getvalue().decode())


@cache
def _command() -> Any:
    """Made once: it takes Typer a sixth of a second, and `CliRunner.invoke` makes it anew for each command."""
    return get_command(build_app())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The modules whose commands ask the store most run on PostgreSQL too."""
    if "store_url" in metafunc.fixturenames:
        kinds = ["sqlite"]
        if metafunc.module.__name__.rpartition(".")[2] in _ALSO_ON_POSTGRES:
            kinds.append(pytest.param("postgres", marks=pytest.mark.postgres))  # type: ignore[arg-type]
        metafunc.parametrize("store_url", kinds, indirect=True)


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path, migrated: MigratedDatabases) -> Iterator[str]:
    """URL of a database without rows of the kind of the test."""
    if request.param == "sqlite":
        yield migrated.sqlite(tmp_path / "shoal.db")
        return
    with migrated.postgres() as url:
        yield url


@pytest.fixture
def service(store_url: str, tmp_path: Path) -> Iterator[Service]:
    state_dir = Path(os.environ["SHOAL_STATE_DIR"])
    with written_service(store_url, state_dir=state_dir, checkpoints=tmp_path / "checkpoints") as running:
        yield running


@pytest.fixture
def shoal(service: Service) -> Shoal:
    return Shoal(service.url)


@pytest.fixture
def session(service: Service) -> Iterator[Session]:
    """What a command has of the server."""
    with ExitStack() as resources:
        yield Session(service.url, Output(as_json=False), resources)


@pytest.fixture
def offline() -> Shoal:
    """Commands against an address without a server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Shoal(f"http://127.0.0.1:{port}")


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC))
    return path
