"""Commands that run on the machine of a server: `serve`, which turns options into settings and calls the composition
root (shoal_api/serve.py); `demo`, which shows that training survives a kill; `backup` and `restore` of the database.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.session import ExitCode, Session, command, keep_given
from shoal_api.demo.show import MIN_STEPS, Scenario, run_demo
from shoal_api.serve import run_server
from shoal_service.core.quantities import count_text
from shoal_service.settings import load_settings
from shoal_service.state_lock import StateLock
from shoal_service.store.backup import Contents, back_up, mark_backup
from shoal_service.store.backup import restore as restore_file


@command(url=False, json=False)
def serve(
    session: Session,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate in PEM; with --tls-key: HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Private key of the certificate.")] = None,
    allow_plain_http: Annotated[
        bool | None,
        typer.Option("--allow-plain-http", help="Listen beyond loopback without TLS: a proxy encrypts."),
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="Directory of the database, checkpoints and code archives.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="postgresql://... or sqlite:///FILE.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Use this Ray cluster instead of starting one.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="Start no cluster: use the one that joins under this name (shoal join)."),
    ] = None,
    num_cpus: Annotated[
        int | None,
        typer.Option("--num-cpus", min=1, help="Logical CPUs of the started cluster; else those found."),
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", min=0, help="GPUs of that cluster; else those found.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Ray nodes to start here, at most one for each CPU.")
    ] = None,
    leave_dead_nodes: Annotated[
        bool | None,
        typer.Option("--leave-dead-nodes", help="A node that dies is not started again, for experiments."),
    ] = None,
    keep_cluster: Annotated[
        bool | None, typer.Option("--keep-cluster", help="The started cluster keeps running when the server ends.")
    ] = None,
    isolate: Annotated[
        bool | None,
        typer.Option("--isolate", help="Run code of jobs as another user (SHOAL_ISOLATE_USER); needs root."),
    ] = None,
) -> None:
    """Run the server: REST API, scheduler, and a local Ray cluster unless --ray-address or --cluster is given.

    Ctrl-C saves every job before the local cluster ends; a second Ctrl-C stops at once.

    An option that is not given is read from the environment (SHOAL_...); otherwise it has its default.
    """
    options = keep_given(
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_plain_http=allow_plain_http,
        state_dir=state_dir,
        database_url=database_url,
        ray_address=ray_address,
        cluster=cluster,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        nodes=nodes,
        leave_dead_nodes=leave_dead_nodes,
        keep_cluster=keep_cluster,
        isolate=isolate,
    )
    run_server(load_settings(**options))


@command(url=False)
def demo(
    session: Session,
    scenario: Annotated[
        Scenario,
        typer.Option("--scenario", help="What is trained, and which failure is shown."),
    ] = Scenario.RECOVERY,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=MIN_STEPS, help="Steps of each run; more, if the new worker takes longer. Default: 120."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running afterwards.")] = False,
) -> None:
    """Train a language model, kill a worker, recover, and compare the losses with an undisturbed run. Two minutes."""
    if not run_demo(session.output, scenario, steps=steps, keep=keep):
        raise typer.Exit(ExitCode.FAILED)


StateDir = Annotated[Path | None, typer.Option("--state-dir", help="Directory of the server's state.")]
DatabaseUrl = Annotated[str | None, typer.Option("--database-url", help="As of `shoal serve`.")]


@command(url=False)
def backup(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the backup.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Write the database of a server into a file: jobs, histories, code archives, quotas. The server may run.

    Checkpoints are not part of it. PostgreSQL needs the program pg_dump.
    """
    settings = load_settings(**keep_given(state_dir=state_dir, database_url=database_url))
    contents = back_up(settings.database_url, file)
    mark_backup(settings.state_dir)
    session.show({"file": str(file), **asdict(contents)}, f"{file}: {_describe(contents)}")


@command(url=False)
def restore(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `shoal backup` has written.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a database that exists.")] = False,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a database of a backup, bring it to the newest schema, and check it. No server may run meanwhile.

    What happened after the backup is lost; jobs continue from their newest checkpoints.
    """
    settings = load_settings(**keep_given(state_dir=state_dir, database_url=database_url))
    with StateLock.take(settings.state_dir):
        result = restore_file(settings.database_url, file, replace=replace, now=time.time())
    lines = [f"restored and checked: {_describe(result.contents)}"]
    if result.aside is not None:
        lines.append(f"the database before is {result.aside}")
    aside = None if result.aside is None else str(result.aside)
    session.show({"aside": aside, **asdict(result.contents)}, "\n".join(lines))


def _describe(contents: Contents) -> str:
    unreadable = f", {contents.unreadable} of them not readable by this release" if contents.unreadable else ""
    return (
        f"{count_text(contents.jobs, 'job')}{unreadable}, {count_text(contents.events, 'event')}, "
        f"{contents.archives} code archives, "
        f"schema {contents.schema}"
    )
