"""Commands about specs and data that need no server: init, validate, check, schema, data prepare, data show."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.program_findings import describe as describe_script
from shoal_api.cli.program_findings import examine, refuse_function_as_task
from shoal_api.cli.render.terminal import command_text
from shoal_api.cli.session import CliError, ExitCode, Output, Session, SetOption, SpecArgument, command
from shoal_api.cli.spec_file import load_spec
from shoal_api.cli.trial import (
    describe_loop,
    describe_task,
    loop_document,
    read_program,
    read_task,
    try_loop,
    try_task,
    with_workers,
)
from shoal_service.core.quantities import count_text
from shoal_workers.contract import JobSpec
from shoal_workers.contract.batch_partition import micro_batches_of_rank
from shoal_workers.contract.checks.consistency import remarks
from shoal_workers.contract.checks.spec_errors import SpecError, job_spec_schema, parse_spec
from shoal_workers.contract.data_preview import DataPreview
from shoal_workers.contract.language_model import LM_TASK

_PLACE = "MODEL_DIRECTORY"
_FINE_TUNE = "fine-tune"
"""The template that names the place of a model."""
_ENDING = ".template"
_SPEC = "job.yaml"


@command(url=False)
def init(
    session: Session,
    template: Annotated[
        str | None, typer.Argument(metavar="TEMPLATE", help="Which template; without it: list them.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Where; without it: a new one with the template's name.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Directory of the Hugging Face model, for the template fine-tune.")
    ] = None,
) -> None:
    """Write a job that runs as it is, to change it: its spec, and the code of its task; or a script, which needs no
    spec."""
    known = templates()
    if model is not None and template != _FINE_TUNE:
        raise CliError(f"--model is for the template {_FINE_TUNE}", hint=f"shoal init {_FINE_TUNE} --model {model}")
    if template is None:
        titles = {name: read_title(folder) for name, folder in known.items()}
        session.show(titles, "\n".join(f"{name:16}{title}" for name, title in titles.items()))
        return
    if template not in known:
        raise CliError(f"there is no template {template!r}", hint=f"use one of {', '.join(known)}")
    if model is not None and not model.is_dir():
        raise CliError(f"--model {str(model)!r} is not a directory", hint="nothing is downloaded: name a local one")
    where = directory or Path(template)
    written = write_template(known[template], where, model)
    has_spec = where / _SPEC in written
    hint = f"shoal submit {where / _SPEC if has_spec else f'{written[0]} --workers 1:4'} --dry-run"
    if model is None and template == _FINE_TUNE:
        hint = f"Set model.path in {where / _SPEC}, then: {hint}"
    lines = [*(f"wrote {path}" for path in written), hint]
    session.show({"files": [str(path) for path in written]}, "\n".join(lines))


def templates() -> dict[str, Traversable]:
    """Return the templates by name."""
    entries = files("shoal_api.cli.templates").iterdir()
    folders = {entry.name: entry for entry in entries if entry.is_dir() and "__" not in entry.name}
    return dict(sorted(folders.items()))


def read_title(template: Traversable) -> str:
    """Return what the template is: the first line of its spec, or of its script."""
    first = template / _SPEC
    if not first.is_file():
        [first] = (file for file in template.iterdir() if file.name.endswith(_ENDING))
    return first.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").removeprefix('"""')


def write_template(template: Traversable, directory: Path, model: Path | None) -> list[Path]:
    """Write the files of a template and return their paths. Raises CliError if one of them exists."""
    sources = {directory / file.name.removesuffix(_ENDING): file for file in template.iterdir() if file.is_file()}
    if existing := [path for path in sources if path.exists()]:
        raise CliError(f"{existing[0]} exists already", hint="name another directory: shoal init TEMPLATE DIRECTORY")
    directory.mkdir(parents=True, exist_ok=True)
    for path, source in sources.items():
        text = source.read_text(encoding="utf-8")
        path.write_text(text if model is None else text.replace(_PLACE, str(model.resolve())), encoding="utf-8")
    return sorted(sources)


@command(url=False)
def validate(session: Session, spec: SpecArgument, assignments: SetOption = None) -> None:
    """Check a spec without a server, and show how each world size would split a step."""
    try:
        parsed = parse_spec(load_spec(spec, assignments or ()))
    except SpecError as error:
        if not session.output.as_json:
            raise
        session.show({"valid": False, "errors": list(error.problems)}, str)
        raise typer.Exit(ExitCode.USAGE) from None
    session.show({"valid": True, "errors": [], "spec": parsed}, describe_spec(parsed))


_FILES = (
    "A job runs in a directory of its own with a copy of the code. Relative files go there, and are kept until it is "
    "deleted: shoal files JOB."
)


@command(url=False)
def check(
    session: Session,
    task: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|TASK|PROGRAM",
            help='A spec, "module:Class" of a module in the current directory, or a program that trains by itself.',
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Those of the program, after --.")
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Read a program with a loop only; do not run it.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time that a loop has for all of its trials.")
    ] = 120.0,
    assignments: SetOption = None,
) -> None:
    """Try a task here: build the model, train three steps, save, load, validate. No server is needed.

    One process, one micro-batch a step, files only in a temporary directory. Says what is wrong, with file and line; or
    the number of parameters, the time of a micro-batch and the memory.

    A program with a loop in place (`shoal.run`) is tried too: four steps undisturbed, and interrupted after the second
    and called again, with two micro-batches a step. Says whether losses and state are equal, and otherwise what the
    loop does not track, with lines; exit code 1. Shoal's files are in a temporary directory; what the program itself
    writes, it writes.

    A script is read, not run: says what of Shoal it can use as it is, what a lost worker costs, and what stands in the
    way of more, with lines.
    """
    if (program := read_program(task, assignments or ())) is not None:
        doors = examine(*program)
        if not doors.is_loop or no_run:
            session.show(doors.document(), describe_script(doors))
            session.output.say(_FILES, "dim")
            return
        document = loop_document(task, program[0], arguments or (), assignments or ())
        trial = try_loop(document, program[1], doors.program, timeout)
        is_proposal = task.endswith(".py") and not any("elasticity" in text for text in assignments or ())
        trial = with_workers(trial, doors.program, document["elasticity"], is_proposal=is_proposal)
        session.show({**doors.document(), "trial": trial}, describe_loop(doors.program, trial, bool(arguments)))
        if not trial["is_whole"]:
            raise typer.Exit(ExitCode.FAILED)
        session.output.say(_FILES, "dim")
        return
    if arguments:
        raise CliError(f"{task} is a task, and a task takes no arguments", hint="change its spec with --set KEY=VALUE")
    if no_run:
        raise CliError(f"{task} is a task, and the check of a task always trains some steps", hint="leave --no-run out")
    document, directory = read_task(task, assignments or ())
    refuse_function_as_task(document | {"code": document["code"] | {"working_dir": str(directory)}})
    session.show(try_task(document, directory), lambda result: describe_task(document["task"], result))
    session.output.say(_FILES, "dim")


@command(url=False)
def schema(session: Session) -> None:
    """Print the JSON Schema of a job spec: every key with its meaning, unit and default."""
    Output(as_json=True).document(job_spec_schema(), "")


@command(url=False)
def prepare(session: Session, spec: SpecArgument, assignments: SetOption = None) -> None:
    """Tokenise the spec's text on this machine before the training. A second call resumes an interrupted one."""
    document = load_spec(spec, assignments or ())
    parsed = parse_spec(document)
    if parsed.program is not None:
        raise CliError("a script or a loop reads its own data; there is nothing to prepare", hint="submit it")
    if parsed.task != LM_TASK:
        raise CliError(
            f"task {parsed.task!r} reads its own data; there is nothing to prepare",
            hint="only data of the built-in language model is prepared",
        )
    # in a process of its own, because the command line never loads torch; it reads the spec from its standard input, so
    # nothing is left behind if one of the two is killed
    program = [sys.executable, "-m", "shoal_workers.data", "-", *(["--json"] if session.output.as_json else [])]
    if subprocess.run(program, check=False, input=json.dumps(document).encode()).returncode:
        raise CliError("the data could not be prepared", hint="see the lines above", exit_code=ExitCode.FAILED)
    session.output.say("data is ready", "good")


@command(url=False)
def show(
    session: Session,
    spec: SpecArgument,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Samples of each split to print.")] = 3,
    assignments: SetOption = None,
) -> None:
    """Show what training will read: samples with the tokens in the loss between [[ and ]], lengths, labels, and what is
    left out."""
    document, directory = read_task(spec, assignments or ())
    if document.get("script") is not None or document.get("loop") is not None:
        raise CliError("a script or a loop reads its own data; there is nothing to show", hint="submit it")
    document["code"] = {**document["code"], "working_dir": "."}
    command_line = [sys.executable, "-m", "shoal_workers.data_show", "--samples", str(samples)]
    ran = subprocess.run(
        command_line, check=False, input=json.dumps(document).encode(), stdout=subprocess.PIPE, cwd=directory
    )
    if ran.returncode:
        raise CliError("the data cannot be shown", hint="see the lines above", exit_code=ExitCode.FAILED)
    session.show(DataPreview.model_validate_json(ran.stdout), describe_data)


def describe_data(preview: DataPreview) -> str:
    """Say what training will read."""
    lines = [f"task {preview.task}"]
    for name, split in preview.splits.items():
        if split is None:
            lines.append(f"{name}: no samples")
            continue
        drawn = f", {split.validated:,} of them are read in each validation" if split.validated is not None else ""
        lines.append(f"{name}: {count_text(split.samples, 'sample')}{drawn}")
        lines += [f"  left out: {reason}: {number:,}" for reason, number in split.left_out.items()]
        if split.num_cut:
            lines.append(f"  cut at model.seq_len: {split.num_cut:,}")
        for title, (least, median, most) in (("tokens", split.tokens), ("tokens in the loss", split.in_loss)):
            if most:
                lines.append(f"  {title}: {least:,} to {most:,}, median {median:,}")
        lines += [f"  label {label}: {100 * share:.1f} %" for label, share in split.labels.items()]
        if split.num_labels > len(split.labels):
            lines.append(f"  and {split.num_labels - len(split.labels):,} rarer labels")
        for number, row in enumerate(split.rows, 1):
            label = f", label {row.label}" if row.label is not None else ""
            tokens = f"{row.tokens:,} tokens, {row.in_loss:,} in the loss" if row.tokens else "as it arrives"
            lines.append(f"  sample {number}: {tokens}{label}")
            for text in row.texts:
                marked = "".join(f"[[{part}]]" if counts else part for part, counts in text.spans)
                lines += [f"    {line}" for line in f"{text.title and text.title + ': '}{marked}".splitlines()]
            lines += [f"    {line}" for line in row.drawn.splitlines()]
    return "\n".join([*lines, *(f"note: {remark}" for remark in preview.remarks)])


def describe_spec(spec: JobSpec) -> str:
    """Say what the valid spec means at each world size that it allows."""
    if spec.program is not None:
        lowest, highest = spec.elasticity.min_workers, spec.elasticity.max_workers
        some = count_text(highest, "worker") if lowest == highest else f"{lowest} to {count_text(highest, 'worker')}"
        kind = "script" if spec.script is not None else "loop"
        return f"{spec.name}: the spec is valid\n  {kind} {command_text(spec.program)}, with {some}"
    num_micro = spec.batch.num_micro_batches
    lines = [
        f"{spec.name}: the spec is valid",
        f"  task {spec.task}",
        f"  {count_text(num_micro, 'micro-batch')} a step",
    ]
    sizes = range(spec.elasticity.min_workers, spec.elasticity.max_workers + 1)
    for world_size in [*sizes][:8]:
        per_rank = len(micro_batches_of_rank(num_micro, 0, world_size))
        padding = per_rank * world_size - num_micro
        lines.append(
            f"  {count_text(world_size, 'worker')}: {count_text(per_rank, 'micro-batch')} each"
            + (f", {padding} of them padding" if padding else "")
        )
    if len(sizes) > 8:
        lines.append(f"  ... up to {count_text(sizes[-1], 'worker')}")
    lines += [f"  {remark}" for remark in remarks(spec)]
    return "\n".join(lines)
