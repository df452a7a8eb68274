"""A PostgreSQL of this test session: a cluster of its own in a temporary directory, on a free port of loopback."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

MISSING = "PostgreSQL's server programs (initdb, pg_ctl) are not installed"


@dataclass(frozen=True)
class PostgresServer:
    programs: Path
    user: str | None
    port: int

    def run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self.programs / program), *arguments], check=True, user=self.user, cwd="/", capture_output=True
        )

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url("postgres"), autocommit=True)

    def url(self, database: str) -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/{database}"

    def schema_url(self, name: str) -> str:
        """A schema looks like a database of its own, and costs a hundredth of one to make."""
        return f"{self.url('postgres')}?options=-csearch_path%3D{name}"

    @contextlib.contextmanager
    def schema(self) -> Iterator[str]:
        """URL of an empty schema, which is dropped afterwards."""
        name = f"shoal_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
            yield self.schema_url(name)
            connection.execute(f"DROP SCHEMA {name} CASCADE".encode())

    def create_database(self, template: str = "template0") -> str:
        """The name of a new database, a copy of the template."""
        name = f"shoal_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        return name

    @contextlib.contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        """URL of a new database, which is dropped afterwards: also for programs that know no schemas."""
        name = self.create_database(template)
        yield self.url(name)
        self.drop_database(name)

    def drop_database(self, name: str) -> None:
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def is_installed() -> bool:
    return _programs() is not None


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Ends it and deletes its files afterwards."""
    programs = _programs()
    assert programs is not None, MISSING
    user = _unprivileged_user()
    # Not pytest's tmp_path: other users may not read it, and its path may be too long for a Unix socket.
    home = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        home.chmod(0o700)
        if user is not None:
            account = pwd.getpwnam(user)
            os.chown(home, account.pw_uid, account.pw_gid)
        server = PostgresServer(programs, user, _free_port())
        data = str(home / "data")
        server.run("initdb", "-D", data, "-U", "shoal", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        settings = f"-c listen_addresses=127.0.0.1 -c port={server.port} -c unix_socket_directories={home} "
        settings += "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=100"
        server.run("pg_ctl", "-D", data, "-w", "-l", str(home / "log"), "-o", settings, "start")
        try:
            yield server
        finally:
            server.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _programs() -> Path | None:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*installed, *([Path(on_path).resolve().parent] if on_path else [])]
    desired = ("initdb", "pg_ctl")
    return next((path for path in candidates if all((path / name).exists() for name in desired)), None)


def _unprivileged_user() -> str | None:
    """initdb refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {account.pw_name for account in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
