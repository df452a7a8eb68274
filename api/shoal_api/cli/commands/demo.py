"""`shoal demo`: shows that training survives a kill."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import Session, command
from shoal_api.demo.show import run_demo
from shoal_api.demo.spec import MIN_STEPS, Scenario


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
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus", help="With --keep: start a Prometheus that scrapes the server, if it is installed."
        ),
    ] = False,
) -> None:
    """Train a language model, kill a worker, recover, and compare the losses with an undisturbed run. Two minutes."""
    if prometheus and not keep:
        raise CliError("--prometheus needs --keep", hint="without it the server ends with the demo")
    if not run_demo(session.output, scenario, steps=steps, keep=keep, prometheus=prometheus):
        raise typer.Exit(ExitCode.FAILED)
