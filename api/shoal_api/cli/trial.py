"""Tries a task or a loop on this machine, within seconds, before it is submitted: that a task trains, and that a loop
tracks all of its state.

`shoal_workers.check` and `shoal_workers.check_loop` do it in a process of its own, because the command line never loads
torch, and because what is tried may crash its process or never end. Hidden here: that process, and what its end means.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal_api.cli.program import Program, code_directory, make_spec
from shoal_api.cli.program_findings import LOOP_COST
from shoal_api.cli.render.terminal import format_number
from shoal_api.cli.session import CliError, ExitCode
from shoal_api.cli.spec_file import apply_overrides, complete, load_spec
from shoal_service.core.quantities import count_text, size_text
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.exit_status import ExitStatus, place_of_crash

_MAX_STACK_CHARS = 100_000
"""Characters that are kept of what the program printed, from its end."""


def describe_task(task: str, result: dict[str, Any]) -> str:
    """Describe the result to people."""
    validation = "" if result["val_loss"] is None else f"; validation loss {result['val_loss']:.4g}"
    lines = [
        f"{task} trains: build, three steps, save, load{'' if result['val_loss'] is None else ' and validation'} work",
        f"  {result['parameters']:,} parameters, checkpoint {size_text(result['checkpoint_bytes'])}",
        f"  {result['micro_batch_s']:.3g} s per micro-batch of "
        f"{count_text(result['micro_size'], 'sample')} on this machine's "
        f"{result['device'].upper()}, one process",
        f"  {size_text(result['memory_bytes'])} of memory at most, Python and libraries included"
        if result["device"] == "cpu"
        else f"  {size_text(result['memory_bytes'])} of GPU memory at most",
        f"  loss {format_number(result['loss'])} in the first step, {format_number(result['last_loss'])} in the third"
        + validation,
    ]
    lines += _layouts(result.get("proofs", ()))
    return "\n".join([*lines, *(f"  note: {remark}" for remark in result["remarks"])])


def _layouts(proofs: Sequence[dict[str, Any]]) -> list[str]:
    """Say what splitting the model has shown."""
    proven = [proof["name"] for proof in proofs if proof["outcome"] == "proven"]
    others = [proof for proof in proofs if proof["outcome"] != "proven"]
    lines = [f"  layouts proven, two steps split against whole: {', '.join(proven)}"] if proven else []
    return [*lines, *(f"  layout {proof['name']} {proof['outcome']}: {proof['words']}" for proof in others)]


def read_program(source: str, assignments: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the file of the script or loop that `source` or its spec names, and the directory of its code; None if it
    is a task. Raises CliError, SpecError."""
    path = Path(source)
    if source.endswith(".py"):
        if not path.is_file():
            raise CliError(f"the script {source} is not there", exit_code=ExitCode.NOT_FOUND, hint="check the path")
        return path, code_directory(Program(file=path))
    if path.suffix not in (".yaml", ".yml", ".json") or not path.is_file():
        return None
    document = load_spec(source, assignments)
    if document.get("script") is None and document.get("loop") is None:
        return None
    if (program := parse_spec(document).program) is None:
        return None
    directory = Path(document.get("code", {}).get("working_dir") or ".")
    if program.file is not None:
        return directory / program.file, directory
    module = directory.joinpath(*str(program.module).split("."))
    files = (module.with_suffix(".py"), module / "__main__.py")
    if (program_file := next((file for file in files if file.is_file()), None)) is None:
        raise CliError(f"module {program.module} is not in {directory}", hint="check code.working_dir")
    return program_file, directory


def read_task(task: str, assignments: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Return the validated spec as a document, and the directory of its code."""
    module, colon, name = task.partition(":")
    if colon and name.isidentifier() and not Path(task).exists() and "/" not in module:
        document = apply_overrides({"task": task, "stop": {"steps": 3}, "code": {"working_dir": "."}}, assignments)
    else:
        document = load_spec(task, assignments)
    spec = parse_spec(document)
    return spec.model_dump(mode="json"), Path(spec.code.working_dir or ".").expanduser()


def try_task(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train a task for some steps, and return what was found. Raises CliError if the task fails."""
    if not directory.is_dir():
        raise CliError(
            f"code.working_dir {directory} is not a directory", hint="name the directory of the task's module"
        )
    return _run_trial("shoal_workers.check", document["task"], document, directory)


def loop_document(source: str, file: Path, arguments: Sequence[str], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the valid spec of a loop. `source`: the spec, or the program itself. Raises CliError, SpecError."""
    if source.endswith(".py"):
        program = Program(file=file, args=tuple(arguments), workers=(1, 4))
        document = complete(make_spec(program, in_place=True), assignments, {})
    elif arguments:
        raise CliError("the spec already has the arguments of the program", hint="change it with --set loop.args=[...]")
    else:
        document = load_spec(source, assignments)
    return parse_spec(document).model_dump(mode="json")


def try_loop(document: dict[str, Any], directory: Path, program: str, timeout_s: float) -> dict[str, Any]:
    """Run a loop several times, and return what was found. Raises CliError if the loop fails, or takes longer."""
    one_thread = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # each trial is a fork
    return _run_trial("shoal_workers.check_loop", program, document, directory, timeout_s, one_thread)


def with_workers(
    trial: dict[str, Any], program: str, elasticity: dict[str, Any], *, is_proposal: bool
) -> dict[str, Any]:
    """Return the result of a trial with the workers that the loop can have. `is_proposal`: fewer do as well.

    Raises:
        CliError: the loop has fewer streams or micro-batches than the spec allows workers.
    """
    least, most = elasticity["min_workers"], elasticity["max_workers"]
    can_have = trial["most_workers"] or most
    if can_have < (least if is_proposal else most):
        raise CliError(
            f"{program} has work for {count_text(can_have, 'worker')} only, because run.batches() divides "
            f"{can_have} micro-batches or streams, but elasticity.max_workers is {most}",
            hint="lower micro_size or elasticity.max_workers, or raise num_streams",
            exit_code=ExitCode.FAILED,
        )
    most = min(most, can_have)
    return {**trial, "workers": str(least) if least == most else f"{least}:{most}"}


def describe_loop(program: str, trial: dict[str, Any], has_arguments: bool = False) -> str:
    """Describe the result to people."""
    return "\n".join(
        [*_loop_lines(program, trial, has_arguments), *(f"  note: {remark}" for remark in trial["remarks"])]
    )


def _loop_lines(program: str, trial: dict[str, Any], has_arguments: bool) -> Iterator[str]:
    tracked = ", ".join(trial["tracked"]) or "nothing"
    if trial["is_whole"]:
        arguments = " -- ..." if has_arguments else ""
        command = f"shoal submit {program} --workers {trial['workers']}{arguments}"
        yield f"{program} calls shoal.run, and its loop trains: {command}"
        if not trial["remarks"] or not trial["remarks"][0].startswith("the loop has ended"):
            yield (
                f"  {count_text(trial['steps'], 'step')} are equal in a worker that joins, after a group "
                f"breaks, and with two workers: the losses, and all that is tracked ({tracked})"
            )
        yield f"  {LOOP_COST}"
        return
    yield f"{program} continues differently from an undisturbed run; it tracks {tracked}"
    for item in trial["differences"]:
        yield (
            f"  {item['trial']}: the first difference is in step {item['step']}: {item['what']} {_is(item['words'])}"
        )
    for item in trial["untracked"]:
        yield f"  not tracked: {item['name']} ({item['place']}); {item['path']} {_is(item['words'])}"
    for suspect in trial["suspects"]:
        yield (f"  possible cause: {suspect}; only run.batches keeps its position, other iterators begin again")
    if trial["untracked"]:
        yield ("put such state into an object with state_dict() and load_state_dict(), and pass it to run.track()")


def _is(state: str) -> str:
    return state if state.startswith(("differs", "has")) else f"is {state}"


def _run_trial(
    module: str,
    program: str,
    document: dict[str, Any],
    directory: Path,
    timeout_s: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run a module that tries a spec, in a process of its own in the directory of the code. It is killed with all that
    it has started after `timeout_s`, or when this command is interrupted.

    Returns:
        What the module has found.

    Raises:
        CliError: `program` fails, crashes the process, or takes longer.
    """
    answer: dict[str, Any] = {}
    document = {**document, "code": {**document["code"], "working_dir": "."}}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-check-") as checkpoints,  # ours: the process may be killed
        tempfile.TemporaryFile("w+", errors="replace") as printed,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", module, checkpoints],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path, **environment, "SHOAL_CHECKPOINT_DIR": checkpoints},
            start_new_session=True,
        )
        timer = threading.Timer(timeout_s or 0.0, _kill, (process,))
        if timeout_s is not None:
            timer.start()
        try:
            with process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(document))
                process.stdin.close()
                for line in process.stdout:
                    answer = json.loads(line)
        except BaseException:
            _kill(process)
            raise
        finally:
            timer.cancel()
        if "found" in answer:
            return dict(answer["found"])
        if "failed" in answer:
            raise _describe_failure(program, answer["failed"])
        if process.returncode == -signal.SIGKILL and timeout_s is not None:
            raise CliError(
                f"the check of {program} was stopped after at most {timeout_s:.0f} s, in "
                f"{answer.get('phase', 'the imports')}, before it had a result",
                hint="raise --timeout SECONDS; --no-run only reads the program",
                exit_code=ExitCode.FAILED,
            )
        printed.seek(0)
        raise _describe_crash(program, process.returncode, answer, printed.read()[-_MAX_STACK_CHARS:])


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe_failure(task: str, failed: dict[str, Any]) -> CliError:
    if not failed.get("is_the_tasks", True):
        message = f"the check of {task} failed before it had a result: {failed['sentence']}"
        return CliError(message, details=tuple(failed["traceback"].splitlines()), exit_code=ExitCode.FAILED)
    refusal = CliError(
        f"{task} does not train ({failed['phase']}): {failed['sentence']}",
        details=() if failed["mistake"] else tuple(failed["traceback"].splitlines()),
        exit_code=ExitCode.FAILED,
    )
    refusal.add_note(failed["traceback"])  # SHOAL_DEBUG=1 shows it
    return refusal


def _describe_crash(task: str, code: int, last: dict[str, Any], printed: str) -> CliError:
    """Return the error of a process that ended without an answer: by a signal, or because it could not begin."""
    status = ExitStatus(signal=-code, place=place_of_crash(printed)) if code < 0 else ExitStatus(code=code)
    when = f", {last['phase']} {last['note']}".rstrip() if last and not status.place else ""
    return CliError(
        f"{task} does not train: its process {status.words()}{when}",
        details=() if status.place else tuple(printed.strip().splitlines()[-12:]),
        hint="native code that the task calls has crashed" if code < 0 and code != -9 else "",
        exit_code=ExitCode.FAILED,
    )
