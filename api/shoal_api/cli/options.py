"""Options and arguments that several commands have. Imports nothing but typer: `shoal --help` loads this module."""

from __future__ import annotations

from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8470"
"""The client's default, repeated here because importing the client takes longer than showing the help."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Write only JSON to standard output.")]
UrlOption = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", help="Address of the Shoal server.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id, unique beginning of an id, or unique name of a job.")
]
JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB...", help="Ids, unique beginnings of ids, or unique names of jobs."),
]
LabelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME[=VALUE]",
        help="Instead of JOB: all jobs with this label; also !NAME and NAME!=VALUE. May be repeated.",
    ),
]
WhereOption = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Instead of JOB: all jobs for which it holds, after a question: 'loss > 3 and label.team == \"speech\"'.",
    ),
]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help='YAML or JSON file; "-" reads standard input.')]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change the spec; may be repeated.")
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
