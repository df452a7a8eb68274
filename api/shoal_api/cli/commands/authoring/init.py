"""`init`: write a template of a job into a directory."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, command

_PLACE = "MODEL_DIRECTORY"
_ENDING = ".template"


def init(
    template: Annotated[
        str | None, typer.Argument(metavar="TEMPLATE", help="Which template; without it: list them.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Where; without it: a new one with the template's name.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Directory of the Hugging Face model, for the template fine-tune.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a job that runs as it is, to change it: its spec, and the code of its task."""
    with command(DEFAULT_URL, as_json) as session:
        from shoal_api.cli.errors import CliError

        known = templates()
        if template is None:
            listed = {name: words_of(folder) for name, folder in known.items()}
            session.output.document(listed, lambda: "\n".join(f"{name:16}{words}" for name, words in listed.items()))
            return
        if template not in known:
            raise CliError(f"there is no template {template!r}", hint=f"use one of {', '.join(known)}")
        if model is not None and not model.is_dir():
            raise CliError(f"--model {str(model)!r} is not a directory", hint="nothing is downloaded: name a local one")
        where = directory or Path(template)
        written = write(known[template], where, model)
        hint = f"shoal submit {where / 'job.yaml'} --dry-run"
        if model is None and template == "fine-tune":
            hint = f"Set model.path in {where / 'job.yaml'}, then: {hint}"
        files_of = {"files": [str(path) for path in written]}
        session.output.document(files_of, lambda: "\n".join((*(f"wrote {path}" for path in written), hint)))


def templates() -> dict[str, Traversable]:
    """By name."""
    folders = (one for one in files("shoal_api.cli.templates").iterdir() if one.is_dir() and "__" not in one.name)
    return {one.name: one for one in sorted(folders, key=lambda one: one.name)}


def words_of(template: Traversable) -> str:
    """What the template is, from the first line of its spec."""
    return (template / "job.yaml").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def write(template: Traversable, directory: Path, model: Path | None) -> list[Path]:
    """The files that were written. Raises CliError: one of them exists."""
    from shoal_api.cli.errors import CliError

    sources = {directory / one.name.removesuffix(_ENDING): one for one in template.iterdir() if one.is_file()}
    if existing := [path for path in sources if path.exists()]:
        raise CliError(f"{existing[0]} exists already", hint="name another directory: shoal init TEMPLATE DIRECTORY")
    directory.mkdir(parents=True, exist_ok=True)
    for path, source in sources.items():
        text = source.read_text(encoding="utf-8")
        path.write_text(text if model is None else text.replace(_PLACE, str(model.resolve())), encoding="utf-8")
    return sorted(sources)
