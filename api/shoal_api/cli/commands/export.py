"""`shoal export`: writes a checkpoint's model as safetensors, which transformers and compatible programs load."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import Session, command
from shoal_api.client import Disconnected
from shoal_service.views import CheckpointState

BEST = "best"


class Dtype(StrEnum):
    """Data type of the tensors that are written."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@command()
def export(
    session: Session,
    source: Annotated[
        str,
        typer.Argument(metavar="JOB_OR_CHECKPOINT", help="A job, or the URL or directory of a checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write to. It must be empty or not exist.")],
    step: Annotated[
        str | None,
        typer.Option("--step", help='Step of the job\'s checkpoint, or "best" by validation. Default: the newest.'),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the tensors that are written.")] = Dtype.FP32,
    raw: Annotated[bool, typer.Option("--raw", help="The weights, also if the job keeps averages of them.")] = False,
) -> None:
    """Write a checkpoint's model as safetensors and config.json.

    transformers' from_pretrained loads Hugging Face models and the built-in language model without experts.
    """
    checkpoint = find_checkpoint(session, source, step)
    written = run_export([checkpoint, str(out), "--dtype", dtype, *["--raw"] * raw])
    sizes = f"{written['tensors']} tensors, {written['bytes']:,} bytes"
    session.show(written, f"{out}: {sizes}, from {written['checkpoint']}")


def run_export(arguments: list[str]) -> dict[str, Any]:
    """Run the exporting program, and return what it has written. In a separate process, because the command line never
    loads torch. Raises CliError."""
    program = [sys.executable, "-m", "shoal_workers.export", *arguments, "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CliError(
            "the checkpoint could not be exported",
            details=tuple(done.stderr.strip().splitlines()[-3:]),
            exit_code=ExitCode.FAILED,
        )
    written: dict[str, Any] = json.loads(done.stdout)
    return written


def find_checkpoint(session: Session, source: str, step: str | None) -> str:
    """Find the checkpoint that `source` names. A word without a slash is the name of a job; it is a directory only if
    no job has that name."""
    if "/" in source or source in (".", ".."):
        if step is not None:
            raise CliError("--step needs a job, not the URL of a checkpoint", hint="leave out --step")
        if "://" not in source and not Path(source).is_dir():
            raise CliError(f"{source} is not a directory", hint="give a job, or a checkpoint's directory")
        return source
    try:
        return _find_job_checkpoint(session, source, step)
    except (CliError, Disconnected) as error:
        is_unknown = isinstance(error, Disconnected) or error.exit_code is ExitCode.NOT_FOUND
        if is_unknown and step is None and Path(source).is_dir():
            return source
        raise


def _find_job_checkpoint(session: Session, job: str, step: str | None) -> str:
    """Return the URL of the newest committed checkpoint of a job, of its checkpoint of `step`, or of the best one."""
    job_id = session.job_id(job)
    committed = [item for item in session.client.checkpoints(job_id) if item.state is CheckpointState.COMMITTED]
    if step not in (None, BEST) and not (step.isascii() and step.isdigit()):
        raise CliError(f"--step {step!r} is neither a step nor {BEST!r}", hint=f"for example: --step {BEST}")
    if step == BEST:
        matches = [item for item in committed if item.best == 1]
    else:
        matches = [item for item in committed if step is None or int(step) == item.step]
    if not matches:
        steps = ", ".join(str(number) for number in sorted(item.step for item in committed)) or "none"
        raise CliError(
            f"job {job_id} has no committed checkpoint"
            + ("" if step is None else " of its best validation" if step == BEST else f" of step {step}"),
            hint=f"steps with a committed checkpoint: {steps}",
        )
    return max(matches, key=lambda checkpoint: checkpoint.step).url
