"""`doctor` and `version`: check this machine, and print the versions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from shoal_api.cli.doctor import Finding, Verdict, list_checks, worst
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.output import Output
from shoal_api.cli.session import Session, command
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
    verdict = worst(findings)
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
