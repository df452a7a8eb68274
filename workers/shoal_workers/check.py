"""`python -m shoal_workers.check`: tries a task in one process: build, three steps, save, load, validate.

    prepare    the class is imported and constructed, the data are opened
    2 steps    one micro-batch each: batch, forward, backward, update
    save       a checkpoint in the directory that the argument names, committed
    load       the state is read back from it, and one more step and a validation follow
    layouts    two steps whole against split: two processes for the data axis and for each axis of the plan

It runs the engine that trains, as a group of one rank with the data axis that the service would choose; `proofs` proves
the layouts. Standard input is the spec as JSON; each line of standard output is a JSON object: {"phase": ...} when a
phase begins, and at last {"found": ...} or {"failed": ...}. If the process crashes, the last phase and the stack on
standard error tell where. Called by `shoal check`.
"""

from __future__ import annotations

import faulthandler
import json
import math
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal_workers.checkpoint.commit import marker_of, newest_committed, write_marker
from shoal_workers.contract import (
    Assignment,
    ErrorReport,
    ExitKind,
    GroupFormed,
    JobSpec,
    Layout,
    LogStream,
    Phase,
    ProofOutcome,
    SavedPart,
    StepReport,
    StepSkipped,
    StopSpec,
    ValidationReport,
    WorkerPoll,
    WorkerReport,
)
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.text_data import MASKED_TASK, PRETRAINED_TASKS
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.generation_ends import LayoutRefused
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.engine_error import engine_error
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import PackagesNotInstalled
from shoal_workers.proofs import Zygote, data_layout, fixed_to_prove, layouts_to_prove
from shoal_workers.training_thread import run_engine

_STEPS = 3
_SAVED_AFTER = 2
_EXAMPLES = 1_000
_TEXT_BYTES = 4 << 20
"""Bytes of the text of a built-in task that are read: enough for a few samples, tokenised within a second."""
_OF_THE_TASK = (ExitKind.USER_ERROR, ExitKind.NON_FINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a task is, and what a micro-batch takes on this machine."""

    parameters: int
    micro_batch_s: float
    """Batch, forward, backward and update of the second step."""
    micro_size: int
    memory_bytes: int
    """Peak of this process; on a GPU, of the tensors there."""
    device: str
    checkpoint_bytes: int
    loss: float | None
    """Loss in the first step; None if it was not finite, and skipped."""
    last_loss: float | None
    val_loss: float | None
    """None if the spec asks for no validation, the task has no such data, or it was not finite."""
    remarks: tuple[str, ...] = ()
    """What is probably not meant, and what was not tried."""
    proofs: tuple[dict[str, Any], ...] = ()
    """Proofs of layouts, as `LayoutProof`; and `name`, the layout in words."""


class TaskRefused(Exception):
    """The task cannot train. `report` tells why."""

    def __init__(self, kind: ExitKind, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.kind = kind
        self.report = report


def main() -> int:
    """Try the task. Return exit status 1 if it cannot train.

    Standard input is the spec; the argument is an empty directory.
    """
    faulthandler.enable()
    spec = parse_spec(json.load(sys.stdin))
    sys.path.insert(0, str(Path(spec.code.working_dir or ".").expanduser()))
    lines, sys.stdout = sys.stdout, sys.stderr  # what the task prints does not belong to the answer

    def write_line(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    zygote = Zygote(make_trial_spec(spec, Path(sys.argv[1])))  # now, because later this process has several threads
    try:
        findings = check(spec, Path(sys.argv[1]), lambda phase, note: write_line({"phase": phase, "note": note}))
        findings = _with_proofs(findings, spec, zygote)
    except TaskRefused as error:
        failed = {**error.report.model_dump(mode="json"), "sentence": error.report.sentence}
        write_line({"failed": {**failed, "is_the_tasks": error.kind in _OF_THE_TASK}})
        return 1
    finally:
        zygote.close()
    write_line({"found": asdict(findings)})
    return 0


def _with_proofs(findings: CheckResult, spec: JobSpec, zygote: Zygote) -> CheckResult:
    """Raises TaskRefused: a layout that the job is certain to use trains another model."""
    layouts, fixed = layouts_to_prove(spec), fixed_to_prove(spec)
    if fixed is None and spec.elasticity.max_workers > 1:
        fixed = data_layout(spec, 2)
    proofs = list(zygote.proofs(layouts))
    for proof in proofs:
        if proof.layout == fixed and proof.outcome is ProofOutcome.REFUSED:
            raise TaskRefused(ExitKind.USER_ERROR, LayoutRefused(proof).report(Phase.BUILDING))
    rows = tuple({**proof.model_dump(mode="json"), "name": proof.layout.describe()} for proof in proofs)
    remarks = findings.remarks
    if len(proofs) < len(layouts):
        remarks += (f"the layout {layouts[len(proofs)].describe()} was not proven: its process has crashed.",)
    return replace(findings, proofs=rows, remarks=remarks)


def check(spec: JobSpec, directory: Path, on_phase: Callable[[Phase, str], None]) -> CheckResult:
    """Train three steps of `spec`; Shoal's own files are only in `directory`.

    Args:
        on_phase: called on the training thread with each phase and the number of completed steps in words.

    Raises:
        TaskRefused: the task, or its data, or its model does not train.
    """
    layout = data_layout(spec, 1)
    findings = _Check(make_trial_spec(spec, directory), layout, directory, on_phase).run()
    return replace(findings, remarks=(*findings.remarks, *_list_untried(spec)))


def _list_untried(spec: JobSpec) -> Iterator[str]:
    if spec.worker.gpus and not torch.cuda.is_available():
        yield "worker.gpus is set, and this machine has no GPU: it was tried on the CPU."
    if spec.compile:
        yield "compile is not tried."


def make_trial_spec(spec: JobSpec, directory: Path) -> JobSpec:
    """Return the spec of the same task with three steps of one micro-batch, on one rank."""
    has_gpu = bool(spec.worker.gpus) and torch.cuda.is_available()
    micro_size = spec.batch.micro_size
    data = spec.data
    if spec.task in (LM_TASK, HF_TASK, MASKED_TASK):
        most = min(_TEXT_BYTES, data.get("max_bytes") or _TEXT_BYTES)
        data = {**data, "max_bytes": most, "cache_dir": str(directory / "text")}
    elif spec.task in PRETRAINED_TASKS:
        most = min(_EXAMPLES, data.get("max_examples") or _EXAMPLES)
        data = {**data, "max_examples": most, "cache_dir": str(directory / "text")}
    return spec.model_copy(
        update={
            "data": data,
            "batch": spec.batch.model_copy(update={"global_size": micro_size}),
            "stop": StopSpec(steps=_STEPS),
            "parallelism": "auto",
            "compile": False,
            "worker": spec.worker if has_gpu else spec.worker.model_copy(update={"gpus": 0}),
            "checkpoint": spec.checkpoint.model_copy(update={"every_steps": None, "every_s": None}),
            "validation": spec.validation.model_copy(
                update={"every_steps": None, "samples": min(spec.validation.samples, micro_size)}
            ),
            "snapshot": spec.snapshot.model_copy(update={"enabled": False}),
        }
    )


class _Check:
    """One try. `run` is called on the main thread; of two others, one trains and one reads the engine's reports."""

    def __init__(self, spec: JobSpec, layout: Layout, directory: Path, on_phase: Callable[[Phase, str], None]) -> None:
        self._spec = spec
        self._layout = layout
        self._root = str(directory.absolute() / "checkpoints")
        self._say = on_phase
        self._outbox = Outbox("check")
        self._store = StoreServer("127.0.0.1", secrets.token_hex(16))
        self._engine = Engine(
            spec, checkpoint_root=self._root, outbox=self._outbox, store=self._store, on_phase=self._on_phase
        )
        self._generation = 1
        self._reports: list[WorkerReport] = []
        self._remarks: list[str] = []
        self._second_step = [0.0, 0.0]
        """When it began and ended."""

    def run(self) -> CheckResult:
        run_engine(
            self._engine,
            self._outbox,
            self._try,
            lambda: self._engine.interrupt(self._generation),
            self._read,
        )
        return self._make_result()

    def _try(self) -> None:
        self._prepare()
        self._train(None)
        self._generation = 2
        self._train(newest_committed(self._root))

    def _prepare(self) -> None:
        try:
            self._engine.prepare()
        except PackagesNotInstalled as error:
            raise TaskRefused(ExitKind.USER_ERROR, engine_error(error, Phase.PREPARING)) from None
        except Exception as error:
            report = getattr(error, "report", None)
            if not isinstance(report, ErrorReport):
                raise
            raise TaskRefused(ExitKind.USER_ERROR, report) from None

    def _train(self, restore_from: str | None) -> None:
        """One generation: until the checkpoint after the second step, or to the end."""
        ended = self._engine.run(
            Assignment(
                job_id="check",
                attempt=1,
                generation=self._generation,
                rank=0,
                layout=self._layout,
                store_host=self._store.host,
                store_port=self._store.port,
                restore_from=restore_from,
            )
        )
        if ended.error is not None:
            raise TaskRefused(ended.kind, ended.error)
        if ended.saved_part is not None:
            marker = marker_of([ended.saved_part], job_id="check", attempt=1, now=time.time())
            write_marker(ended.saved_part.directory, marker)

    def _on_phase(self, phase: Phase, step: int) -> None:
        if self._generation == 1 and phase is Phase.FORWARD and step == _SAVED_AFTER - 1:
            self._engine.request_yield(1)
            self._second_step[0] = time.perf_counter()
        elif self._generation == 1 and phase is Phase.SAVING:
            self._second_step[1] = time.perf_counter()
        self._say(phase, f"after step {step}" if step else "")

    def _read(self, poll: WorkerPoll) -> None:
        self._reports += poll.reports
        self._remarks += [line.text for line in poll.logs if line.stream is LogStream.SHOAL]
        for report in poll.reports:
            if isinstance(report, SavedPart):
                self._engine.note_commit(self._generation, report.step)

    def _make_result(self) -> CheckResult:
        losses = [item.loss for item in self._reports if isinstance(item, StepReport | StepSkipped)]
        formed = next(item for item in self._reports if isinstance(item, GroupFormed))
        saved = next(item for item in self._reports if isinstance(item, SavedPart))
        validated = [item.loss for item in self._reports if isinstance(item, ValidationReport)]
        val_loss = validated[-1] if validated else None
        not_finite = [
            f"{name} is {value}, which is not finite."
            for name, value in (("the loss of a step", losses[-1]), ("the validation loss", val_loss))
            if value is not None and not math.isfinite(value)
        ]
        return CheckResult(
            parameters=formed.num_parameters,
            micro_batch_s=self._second_step[1] - self._second_step[0],
            micro_size=self._spec.batch.micro_size,
            memory_bytes=self._memory_bytes(),
            device=self._engine.device,
            checkpoint_bytes=sum(file.bytes for file in saved.files),
            loss=_finite(losses[0]),
            last_loss=_finite(losses[-1]),
            val_loss=_finite(val_loss),
            remarks=(*self._remarks, *not_finite),
        )

    def _memory_bytes(self) -> int:
        if self._engine.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finite(loss: float | None) -> float | None:
    """JSON has no other numbers."""
    return loss if loss is not None and math.isfinite(loss) else None


if __name__ == "__main__":
    sys.exit(main())
