"""`shoal join`: runs the gateway of a Ray cluster, which dials a Shoal service.

The command becomes the gateway's process (`shoal_service.gateway.process`): Ray is not imported here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from shoal_api.cli.session import CliError, Session, command
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherit_environment
from shoal_service.clusters.wire import COMMAND, GatewayConfig
from shoal_service.home import Home
from shoal_workers.contract import check_labels


@command(url=False, json=False)
def join(
    session: Session,
    service_url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the Shoal service, as https://shoal:8470.")
    ],
    token: Annotated[
        str | None,
        typer.Option("--token", help="Token of the cluster; see `shoal token create --cluster`. Or SHOAL_TOKEN."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with that token.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the cluster at the service.")] = "default",
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=VALUE", help="Label of the cluster and of all its nodes. May be repeated."
        ),
    ] = None,
    home_url: Annotated[
        str | None,
        typer.Option(
            "--home-url",
            help="Address at which the nodes reach the service, if it differs from URL; or SHOAL_HOME_URL.",
        ),
    ] = None,
    ray_address: Annotated[
        str, typer.Option("--ray-address", help="host:port of the Ray cluster; auto: the one of this machine.")
    ] = "auto",
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="Authority of the service's certificate, in PEM.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take over the name of another Ray cluster that no longer reports.")
    ] = False,
) -> None:
    """Join a Ray cluster to a service: jobs then run on it. Runs until Ctrl-C.

    The command only dials out. While the service does not answer, it tries again. Jobs that run in the cluster go on
    without it.
    """
    Session(service_url, session.output).check_url()
    home = home_url or os.environ.get("SHOAL_HOME_URL") or service_url
    config = _config(service_url, _find_token(token, token_file), name, ray_address, ca_file, home)
    config = config.model_copy(update={"labels": _parse_labels(label or []), "replaces": replace})
    _become(config, os.environ)


def _config(url: str, token: str, name: str, ray_address: str, ca_file: Path | None, home_url: str) -> GatewayConfig:
    ca = "" if ca_file is None else _read_file("--ca-file", ca_file)
    try:
        if ca:
            ssl.create_default_context(cadata=ca)
        home = Home(url=home_url, ca=ca)
        return GatewayConfig(url=url, token=token, cluster=name, ca=ca, ray_address=ray_address, home=home)
    except ssl.SSLError as error:
        raise CliError(f"--ca-file {ca_file} has no usable certificate: {error}") from None
    except ValidationError:
        raise CliError(
            f"--name {name!r} is not the name of a cluster", hint="lower-case letters, digits and hyphens, as in east-1"
        ) from None


def _read_file(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{option} {path} cannot be read: {error}") from None


def _parse_labels(texts: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key in labels:
            wrong = "is given twice" if key in labels else "has no value"
            raise CliError(f"--label {text!r} {wrong}", hint="--label region=eu")
        labels[key] = value
    try:
        return check_labels(labels)
    except ValueError as error:
        raise CliError(f"--label: {error}") from None


def _find_token(token: str | None, token_file: Path | None) -> str:
    given = token if token_file is None else _read_file("--token-file", token_file).strip()
    token = given or os.environ.get("SHOAL_TOKEN")
    if not token:
        raise CliError(
            "no token of the cluster is given",
            hint="--token, --token-file or SHOAL_TOKEN; an admin makes one: shoal token create NAME --cluster CLUSTER",
        )
    return token


def _become(config: GatewayConfig, environment: Mapping[str, str]) -> None:
    """Replace this process by the gateway; does not return. The token is passed in a file without a name, so it is
    neither in the arguments nor in the environment of the process."""
    memory = os.memfd_create("gateway")
    with os.fdopen(os.dup(memory), "wb") as file:
        file.write(config.model_dump_json().encode() + b"\n")
    os.lseek(memory, 0, os.SEEK_SET)
    os.dup2(memory, 0)
    os.execve(COMMAND[0], COMMAND, {**CLUSTER_ENVIRONMENT, **inherit_environment(environment, keep_ray_access=True)})
