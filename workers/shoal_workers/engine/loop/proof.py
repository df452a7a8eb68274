"""Proves a loop during its first two steps: two workers, and a restore, must train the same model as one process.

    rank 0    a new job begins: fork --+--> trials, each in a fork of its own (trials.py): two steps in one process;
              step 1                   |    a newcomer that goes on after step 1; two ranks
              step 2, a save      <----+--- proven, refused with what differs, or not known and why
              step 3

All ranks wait in step 3 until rank 0 has the answer, at most PATIENCE_S. No checkpoint is saved before. Trials compute
on the CPU and cannot write outside of their directory (process/confined.py). An answer, proven or refused, is stored
like the proofs of tasks, so a loop is proven once. Training thread of rank 0 only.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch

from shoal_workers.contract.checks.legality import loop_layout
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.trials import Crashed, TrialEngine, TrialPlan, run_trials
from shoal_workers.engine.loop.verdict import NEWCOMER, SPLIT, UNDISTURBED, WITH_TWO
from shoal_workers.engine.process.confined import confine
from shoal_workers.engine.proof.before_training import find_proof, keep_proof

PATIENCE_S = 60.0
_NUM_STEPS = 2
_MOST_MICRO_BATCHES = 2
"""Micro-batches of each half of a step, at most."""
_POLL_S = 0.2
_MAX_NAMES = 8
"""Variables and loaders in a message, at most."""


class LoopProof:
    """Proof of the loop of a job. Rank 0 of the first generation makes it."""

    def __init__(
        self,
        spec: JobSpec,
        function: Callable[[Run], None],
        make_engine: Callable[..., TrialEngine],
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._say = say
        self._layout = loop_layout(spec.parallelism, min(2, spec.elasticity.max_workers))
        self._answer = find_proof(spec, self._layout)
        self._pid = 0
        if self._answer is not None:
            self._say_remark(self._answer)
        else:
            self._directory = Path(tempfile.mkdtemp(prefix="proof-", dir=get_temp_dir()))
            self._started_mono = time.monotonic()
            self._start_trials(function, make_engine)

    def observe(self, step: int, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """Wait for the answer if the proof's steps are complete. Raises ValueError if the loop is refused."""
        if step >= _NUM_STEPS:
            self.settle(check, note)

    def settle(self, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """Wait for the answer. Raises ValueError, in each call, if the loop is refused."""
        if self._answer is None:
            self._answer = self._wait_for_answer(check, note)
            self.close()
            if self._answer.outcome is ProofOutcome.UNPROVEN:
                self._say(f"the loop was not proven: {self._answer.words}")
            else:
                keep_proof(self._spec, self._answer)
                self._say_remark(self._answer)
        if self._answer.outcome is ProofOutcome.REFUSED:
            raise ValueError(self._answer.words)

    def _say_remark(self, answer: LayoutProof) -> None:
        if answer.outcome is ProofOutcome.PROVEN and answer.words:
            self._say(answer.words)

    def close(self) -> None:
        """End the trials, because there is an answer, or the group has ended."""
        if self._pid:
            if self._answer is None:
                self._say("the loop was not proven: its first group has ended before its trials")
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
                while True:  # what trials have left running is a child of this process now
                    os.waitpid(-self._pid, 0)
            os.close(self._read_end)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._pid = 0

    def _start_trials(self, function: Callable[[Run], None], make_engine: Callable[..., TrialEngine]) -> None:
        parent = os.getpid()
        self._read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            # Python warns because the process has other threads. They hold no lock that a trial needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                confine(self._directory, parent=parent, kept=write_end)
                os.write(write_end, json.dumps(_run_and_judge(self._make_plan(function, make_engine))).encode())
            except BaseException as error:
                os.write(write_end, json.dumps([ProofOutcome.UNPROVEN, f"{type(error).__name__}: {error}"]).encode())
            finally:
                os.write(write_end, b"\n")
                os._exit(0)
        os.close(write_end)

    def _make_plan(self, function: Callable[[Run], None], make_engine: Callable[..., TrialEngine]) -> TrialPlan:
        return TrialPlan(
            spec=make_trial_spec(self._spec, self._directory, entered_after=1, on_gpu=False, in_memory=False),
            function=function,
            make_engine=make_engine,
            directory=self._directory,
            entered_after=1,
            steps_after=_NUM_STEPS - 1,
            most_micro_batches=_MOST_MICRO_BATCHES,
            is_silent=True,
            on_thread=lambda call, _: call(),
        )

    def _wait_for_answer(self, check: Callable[[], None], note: Callable[[str], None]) -> LayoutProof:
        deadline_mono, text = time.monotonic() + PATIENCE_S, b""
        while not text.endswith(b"\n"):
            check()
            note("proving the loop")
            if select.select([self._read_end], [], [], _POLL_S)[0]:
                if not (more := os.read(self._read_end, 1 << 16)):
                    return self._make_proof(ProofOutcome.UNPROVEN, "its trials were killed")
                text += more
            elif time.monotonic() > deadline_mono:
                spent_s = time.monotonic() - self._started_mono
                return self._make_proof(ProofOutcome.UNPROVEN, f"its trials have taken more than {spent_s:.0f} s")
        outcome, reason = json.loads(text)
        return self._make_proof(ProofOutcome(outcome), reason)

    def _make_proof(self, outcome: ProofOutcome, reason: str) -> LayoutProof:
        seconds = time.monotonic() - self._started_mono
        return LayoutProof(layout=self._layout, outcome=outcome, words=reason, seconds=seconds)


def make_trial_spec(spec: JobSpec, directory: Path, *, entered_after: int, on_gpu: bool, in_memory: bool) -> JobSpec:
    """Return the spec of a trial: a checkpoint after that step, and with `in_memory` a snapshot after each step."""
    return spec.model_copy(
        update={
            "worker": spec.worker if on_gpu else spec.worker.model_copy(update={"gpus": 0}),
            "checkpoint": spec.checkpoint.model_copy(
                update={"every_s": None, "every_steps": entered_after, "url": str(directory)}
            ),
            "snapshot": spec.snapshot.model_copy(update={"enabled": in_memory, "budget": 1.0}),
        }
    )


def _run_and_judge(plan: TrialPlan) -> tuple[ProofOutcome, str]:
    """Run the trials in this process. Return the outcome and its reason."""
    torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork
    names = [UNDISTURBED, NEWCOMER, *([SPLIT] if plan.spec.elasticity.max_workers > 1 else [])]
    try:
        findings, _ = run_trials(plan, names, lambda _: None)
    except Crashed as crashed:
        return ProofOutcome.UNPROVEN, f"a trial has ended: {crashed}"
    if (failure := findings.get("failed")) is not None:
        if "sentence" not in failure:  # the trials were not possible
            return ProofOutcome.UNPROVEN, failure["message"]
        entry = f", {failure['after']}" if failure["after"] else ""
        return ProofOutcome.UNPROVEN, f"a trial has failed{entry}: {failure['sentence']}"
    return judge(findings)


def _describe_untracked(findings: Mapping[str, Any]) -> str:
    """Return what has another value after a restore, without an effect in the steps of the proof; empty if nothing."""
    names = [f"{variable['path']} ({variable['place']})" for variable in findings["untracked"]][:_MAX_NAMES]
    state = (
        f"not tracked, and not the same after a restore: {', '.join(names)}. The first steps do not depend on it. If "
        "later ones do, track an object that has it in its state_dict(): each worker has its own, and a new worker "
        "begins without it"
    )
    return ". ".join([*([state] if names else []), *findings["remarks"]])


def judge(findings: Mapping[str, Any]) -> tuple[ProofOutcome, str]:
    """Return the outcome of the findings of a verdict, and its reason for the user."""
    if not findings["differences"]:
        return ProofOutcome.PROVEN, _describe_untracked(findings)
    first = findings["differences"][0]
    verb = "" if first["words"].startswith(("differs", "has")) else "is "
    differs = f"{first['what']} {verb}{first['words']}"
    if first["trial"].startswith("two undisturbed"):
        return ProofOutcome.UNPROVEN, f"two runs of it are not the same. In step {first['step']} {differs}"
    if first["trial"] == WITH_TWO:
        return ProofOutcome.REFUSED, (
            f"with two workers this loop trains another model than in one process: in step {first['step']} {differs}. "
            "Each worker has other micro-batches, and another number of them. What is done in each micro-batch, or by "
            "what one worker knows, may be why: gradients that are clipped or forgotten, schedules, averages, "
            "parameters. Two ways out: clip by run.steps(optimizer, clip=...), which also forgets gradients; or change "
            "what is tracked once run.steps(optimizer) has returned True, alike on all ranks (by run.loss or run.step)."
        )
    names = [f"{variable['path']} ({variable['place']})" for variable in findings["untracked"]]
    names += findings["suspects"]
    carriers = f" Not tracked, and not the same then: {', '.join(names[:_MAX_NAMES])}." if names else ""
    if findings["most_workers"] is None:
        carriers += (
            " It reads no run.batches(): if it draws its data, seed them by the step (torch.manual_seed(run.step))."
        )
    return ProofOutcome.REFUSED, (
        f"this loop trains another model after a restore: in step {first['step']}, with {first['trial']}, {differs}."
        f"{carriers} Each rank has its own, and a new worker begins without it. Two ways out: track an object that has "
        "it in its state_dict(), and change it after the update, alike on all ranks (by run.loss or run.step); or keep "
        "it in a buffer of a tracked module that checkpoints hold."
    )
