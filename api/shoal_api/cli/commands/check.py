"""`demo`, `doctor` and `version`: show that Shoal works, check this machine, print the versions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command
from shoal_api.demo.spec import MIN_STEPS, Scenario

if TYPE_CHECKING:
    from shoal_api.cli.doctor import Finding
    from shoal_api.cli.output import Output


def demo(
    scenario: Annotated[
        Scenario,
        typer.Option(
            "--scenario",
            help="What is trained, and which failure is shown.",
        ),
    ] = (Scenario.RECOVERY),
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
    as_json: JsonFlag = False,
) -> None:
    """Train a language model, kill a worker, recover, and compare the losses with an undisturbed run. Two minutes."""
    with command(DEFAULT_URL, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.demo.show import run_demo

        if prometheus and not keep:
            raise CliError("--prometheus needs --keep", hint="without it the server ends with the demo")
        if not run_demo(session.output, scenario, steps=steps, keep=keep, prometheus=prometheus):
            raise typer.Exit(ExitCode.FAILED)


def doctor(
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="Check this database instead of the configured one.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine and the server. Exit code 1 if something would prevent jobs from running."""
    with command(url, as_json) as session:
        from shoal_api.cli.doctor import Verdict, checks_of, worst

        colours = {Verdict.OK: "good", Verdict.WARN: "warn", Verdict.FAIL: "bad"}
        findings: list[Finding] = []
        for finding in examine(session.output, checks_of(url, database_url)):
            findings.append(finding)
            if not as_json:
                session.output.line(
                    finding, f"{finding.verdict:<5} {finding.check}: {finding.message}", colours[finding.verdict]
                )
                if finding.hint:
                    session.output.line(finding, f"      {finding.hint}", "dim")
        verdict = worst(findings)
        session.output.document(
            {"verdict": verdict, "findings": findings},
            lambda: "jobs cannot run on this machine" if verdict is Verdict.FAIL else "jobs can run on this machine",
        )
        if verdict is Verdict.FAIL:
            raise typer.Exit(ExitCode.FAILED)


def examine(output: Output, checks: Iterable[tuple[str, Callable[[], Finding]]]) -> Iterator[Finding]:
    """Run the checks one after the other. Some take many seconds, so each is named before it begins."""
    for name, check in checks:
        with output.working(f"checking {name} ..."):
            finding = check()
        yield finding


def version(as_json: JsonFlag = False) -> None:
    """Print the versions of Shoal, Ray, torch and Python."""
    with command(DEFAULT_URL, as_json) as session:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        from shoal_workers.version import VERSION

        versions: dict[str, str | None] = {"shoal": VERSION}
        for name in ("ray", "torch"):
            try:
                versions[name] = installed(name)
            except PackageNotFoundError:
                versions[name] = None
        versions["python"] = sys.version.split()[0]
        session.output.document(
            versions, lambda: "\n".join(f"{name} {number or 'not installed'}" for name, number in versions.items())
        )
