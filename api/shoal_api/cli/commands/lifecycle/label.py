"""`label` and `annotate`: names and texts of a job, as `kubectl` writes them: NAME=VALUE sets, NAME- removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from shoal_service.views import JobPatch

ChangesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE | NAME-]...", help="Set it, or remove it; without any, they are shown."),
]


def label(
    job: JobArgument, changes: ChangesArgument = None, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Change labels of a job, also of one that has ended: `shoal label JOB team=speech draft-`."""
    with command(url, as_json) as session:
        from shoal_service.views import JobPatch

        given = changes_of("label", changes or [])
        _change(session, job, JobPatch(labels=given) if given else None, "labels")


def annotate(
    job: JobArgument, changes: ChangesArgument = None, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False
) -> None:
    """Change annotations of a job, also of one that has ended: `shoal annotate JOB why="Is 3e-4 too much?"`."""
    with command(url, as_json) as session:
        from shoal_service.views import JobPatch

        given = changes_of("annotate", changes or [])
        _change(session, job, JobPatch(annotations=given) if given else None, "annotations")


def changes_of(verb: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Values by name; None: to be removed. Raises CliError."""
    from shoal_api.cli.errors import CliError

    found: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and not text.endswith("-"):
            raise CliError(f"{text!r} changes nothing", hint=f"shoal {verb} JOB {text}=VALUE, or {text}- to remove it")
        name = name if equals else text[:-1]
        if name in found:
            raise CliError(f"{name!r} is given twice", hint=f"shoal {verb} --help")
        found[name] = value if equals else None
    return found


def _change(session: Session, reference: str, patch: JobPatch | None, key: str) -> None:
    with session.open_client() as client:
        job_id = session.job_id(client, reference)
        view = client.patch(job_id, patch) if patch is not None else client.job(job_id)
    held: dict[str, str] = getattr(view.spec, key)
    words = "\n".join(f"{name}={value}" for name, value in sorted(held.items())) or f"no {key}"
    session.output.document(view, lambda: f"{view.id}  {view.name}  {view.status.state}\n{words}")
