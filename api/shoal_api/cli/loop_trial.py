"""Tries a loop on this machine, within seconds, before it is submitted: whether it tracks all of its state. Called by
`shoal check`.

Starts `shoal_workers.check_loop`, because the command line never loads torch, and because the loop may crash its
process or never end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal_api.cli.exit_codes import ExitCode
from shoal_service.core.quantities import count_text


def loop_document(source: str, file: Path, arguments: Sequence[str], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the valid spec of a loop. `source`: the spec, or the program itself. Raises CliError, SpecError."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.program import Program, spec_of
    from shoal_api.cli.spec_file import completed, load_spec
    from shoal_workers.contract.checks.spec_errors import parse_spec

    if source.endswith(".py"):
        document = completed(spec_of(Program(file=file, args=tuple(arguments)), in_place=True), assignments, {})
    elif arguments:
        raise CliError("the spec has the arguments of the program", hint="change it with --set loop.args=[...]")
    else:
        document = load_spec(source, assignments)
    return parse_spec(document).model_dump(mode="json")


def try_loop(document: dict[str, Any], directory: Path, program: str, timeout_s: float) -> dict[str, Any]:
    """Run the trials in a separate process.

    Raises:
        CliError: the loop fails, or takes longer.
    """
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.task_trial import answer_of, crashed, refused

    answer, code, text = answer_of(
        "shoal_workers.check_loop",
        {**document, "code": {**document["code"], "working_dir": "."}},
        directory,
        timeout_s=timeout_s,
        OMP_NUM_THREADS="1",  # each trial is a fork
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )
    if "found" in answer:
        return dict(answer["found"])
    if "failed" in answer:
        raise refused(program, {"is_the_tasks": True, **answer["failed"]})
    if code == -9:
        raise CliError(
            f"{program} was not tried to the end: it was killed in {answer.get('phase', 'the imports')}, after at most "
            f"{timeout_s:.0f} s",
            hint="--timeout SECONDS gives it more; --no-run only reads it",
            exit_code=ExitCode.FAILED,
        )
    raise crashed(program, code, answer, text)


def describe(program: str, trial: dict[str, Any], has_arguments: bool = False) -> str:
    """Say to people what was found."""
    return "\n".join([*_lines(program, trial, has_arguments), *(f"  note: {remark}" for remark in trial["remarks"])])


def _lines(program: str, trial: dict[str, Any], has_arguments: bool) -> Iterator[str]:
    tracked = ", ".join(trial["tracked"]) or "nothing"
    if trial["is_whole"]:
        arguments = " -- ..." if has_arguments else ""
        yield f"{program} gives its loop to shoal.run, and it trains: shoal submit {program} --workers 1:4{arguments}"
        if not trial["remarks"] or not trial["remarks"][0].startswith("the loop has ended"):
            yield (
                f"  {count_text(trial['steps'], 'step')}, and the same in a worker that joins and in one whose group "
                f"breaks: losses are equal, and so is what it tracks ({tracked})"
            )
        yield "  a lost worker costs one step at most, and processes and memory are kept"
        return
    yield f"{program} does not go on as the undisturbed run does; it tracks {tracked}"
    for one in trial["differences"]:
        yield f"  {one['trial']}: step {one['step']} is the first that differs: {one['what']} {_of(one['words'])}"
    for one in trial["untracked"]:
        yield f"  not tracked: {one['name']} ({one['place']}); {one['path']} {_of(one['words'])}"
    for one in trial["suspects"]:
        yield f"  suspect: {one}; the position of run.batches is kept, and that of no other iterator"
    if trial["untracked"]:
        yield "what belongs to the state is an object with state_dict() and load_state_dict(), named in run.track()"


def _of(words: str) -> str:
    return words if words.startswith(("differs", "has")) else f"is {words}"
