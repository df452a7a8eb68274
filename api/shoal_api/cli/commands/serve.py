"""`shoal serve`: turns options into settings and calls the composition root (shoal_api/serve.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.options import given
from shoal_api.cli.session import Session, command
from shoal_api.serve import run_server
from shoal_service.settings import load_settings


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
    options = given(
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
