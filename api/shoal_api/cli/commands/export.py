"""`shoal export`: a checkpoint as safetensors, for transformers and everything that reads what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, Session, UrlOption, command


class Dtype(StrEnum):
    """Of the tensors that are written."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB_OR_CHECKPOINT", help="A job, or the URL or directory of a checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must be empty, or not exist.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of a job: its checkpoint of this step.")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the tensors that are written.")] = Dtype.FP32,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint's model as safetensors and config.json. Of a job: its newest committed checkpoint.

    Hugging Face models, and the built-in language model without experts, are read by transformers' from_pretrained.
    """
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError

        is_place = "://" in source or Path(source).is_dir()
        if is_place and step is not None:
            raise CliError("--step chooses among a job's checkpoints", hint="name the checkpoint's own directory")
        if not is_place and "/" in source:
            raise CliError(f"{source} is no directory", hint="name a job, or where a checkpoint lies")
        checkpoint = source if is_place else _checkpoint_of(session, source, step)
        # In a process of its own, because the command line never loads the training side.
        program = [sys.executable, "-m", "shoal_workers.export", checkpoint, str(out), "--dtype", dtype, "--json"]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CliError(
                "the checkpoint could not be exported",
                details=tuple(done.stderr.strip().splitlines()[-3:]),
                exit_code=ExitCode.FAILED,
            )
        told = json.loads(done.stdout)
        words = f"{out}: {told['tensors']} tensors, {told['bytes']:,} bytes, from {told['checkpoint']}"
        session.output.document(told, lambda: words)


def _checkpoint_of(session: Session, job: str, step: int | None) -> str:
    """URL of the newest committed checkpoint of a job, or of that of a step."""
    from shoal_api.cli.errors import CliError

    with session.open_client() as client:
        job_id = session.job_id(client, job)
        committed = [one for one in client.checkpoints(job_id) if one.state == "committed"]
    fitting = [one for one in committed if step in (None, one.step)]
    if not fitting:
        steps = ", ".join(str(one.step) for one in sorted(committed, key=lambda one: one.step)) or "none"
        raise CliError(
            f"job {job_id} has no committed checkpoint" + ("" if step is None else f" of step {step}"),
            hint=f"steps with a committed checkpoint: {steps}",
        )
    return max(fitting, key=lambda one: one.step).url
