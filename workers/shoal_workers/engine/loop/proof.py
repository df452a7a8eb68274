"""Proves a loop during its first two steps: two workers, and a restore, must train the same model as one process.

    rank 0    a new job begins: fork --+--> trials, each in a fork of its own (trials.py): two steps in one process;
              step 1                   |    a newcomer that goes on after step 1; two ranks
                                       |    if steps are short: sixteen steps, a newcomer that goes on after step 7
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shoal_workers.engine.loop.verdict import NEWCOMER, SPLIT, UNDISTURBED, WITH_TWO, Trial
from shoal_workers.engine.process.confined import confine
from shoal_workers.engine.proof.before_training import find_proof, keep_proof

PATIENCE_S = 60.0
_NUM_STEPS = 2
_LATE_ENTRIES = (7, 5)
"""Steps after which a newcomer enters that finds what has begun late: the first of these that the loop reaches. Few
loops copy weights after just so many steps: right after it a newcomer would make the same copy."""
_STEPS_AFTER_LATE_ENTRY = 8
_MOST_LATE_S, _EXPECTED_LATE_S = 40.0, 10.0
"""Seconds that late trials may take, or they find nothing; and that they may be expected to take, or none is made."""
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
            answer: tuple[ProofOutcome, str] | None = None
            try:
                confine(self._directory, parent=parent, kept=write_end)
                for answer in self._run_and_judge(function, make_engine):
                    os.write(write_end, f"{json.dumps(answer)}\n".encode())
            except BaseException as error:
                if answer is None:  # late trials do not take it back
                    answer = ProofOutcome.UNPROVEN, f"{type(error).__name__}: {error}"
                    os.write(write_end, f"{json.dumps(answer)}\n".encode())
            finally:
                os._exit(0)
        os.close(write_end)

    def _run_and_judge(
        self, function: Callable[[Run], None], make_engine: Callable[..., TrialEngine]
    ) -> Iterator[tuple[ProofOutcome, str]]:
        """Run the trials in this process. Yield the outcome and its reason, and again after late trials."""
        torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork

        def make_plan(entered_after: int, steps_after: int) -> TrialPlan:
            directory = self._directory / f"after-{entered_after}"
            directory.mkdir()
            return TrialPlan(
                spec=make_trial_spec(self._spec, directory, entered_after=entered_after, on_gpu=False, in_memory=False),
                function=function,
                make_engine=make_engine,
                directory=directory,
                entered_after=entered_after,
                steps_after=steps_after,
                most_micro_batches=_MOST_MICRO_BATCHES,
                is_silent=True,
                on_thread=lambda call, _: call(),
            )

        names = [UNDISTURBED, NEWCOMER, *([SPLIT] if self._spec.elasticity.max_workers > 1 else [])]
        outcome, reason, undisturbed = _run_trials(make_plan(1, _NUM_STEPS - 1), names)
        yield outcome, reason
        for entered_after in _LATE_ENTRIES:
            num_steps = 2 * (entered_after + _STEPS_AFTER_LATE_ENTRY)
            is_long = undisturbed is None or num_steps * undisturbed.step_s > _EXPECTED_LATE_S
            if outcome is not ProofOutcome.PROVEN or is_long:
                return
            late_outcome, late_reason, late = _run_trials(
                make_plan(entered_after, _STEPS_AFTER_LATE_ENTRY), [UNDISTURBED, NEWCOMER]
            )
            if late_outcome is ProofOutcome.REFUSED:
                yield late_outcome, late_reason
            elif late is None:
                yield outcome, ". ".join(filter(None, [reason, f"Later steps were not proven: {late_reason}"]))
            if late is None or len(late.losses) > entered_after:
                return

    def _wait_for_answer(self, check: Callable[[], None], note: Callable[[str], None]) -> LayoutProof:
        """Wait for the answer, and a little longer for the one of the late trials."""
        deadline_mono, text, num_answers = time.monotonic() + PATIENCE_S, b"", 0
        while time.monotonic() < deadline_mono:
            check()
            note("proving the loop")
            if not select.select([self._read_end], [], [], _POLL_S)[0]:
                continue
            more = os.read(self._read_end, 1 << 16)
            if not more:
                break
            text += more
            if not num_answers and b"\n" in text:
                deadline_mono = min(deadline_mono, time.monotonic() + _MOST_LATE_S)
            num_answers = text.count(b"\n")
        if num_answers:
            outcome, reason = json.loads(text.split(b"\n")[num_answers - 1])
            return self._make_proof(ProofOutcome(outcome), reason)
        spent_s = time.monotonic() - self._started_mono
        is_late = time.monotonic() >= deadline_mono
        reason = f"its trials have taken more than {spent_s:.0f} s" if is_late else "its trials were killed"
        return self._make_proof(ProofOutcome.UNPROVEN, reason)

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


def _run_trials(plan: TrialPlan, names: Sequence[str]) -> tuple[ProofOutcome, str, Trial | None]:
    """Return the outcome of trials, its reason, and the undisturbed trial; None if a trial has ended or failed."""
    try:
        findings, undisturbed = run_trials(plan, names, lambda _: None)
    except Crashed as crashed:
        return ProofOutcome.UNPROVEN, f"a trial has ended: {crashed}", None
    if (failure := findings.get("failed")) is not None:
        if "sentence" not in failure:  # the trials were not possible
            return ProofOutcome.UNPROVEN, failure["message"], None
        entry = f", {failure['after']}" if failure["after"] else ""
        return ProofOutcome.UNPROVEN, f"a trial has failed{entry}: {failure['sentence']}", None
    return *judge(findings), undisturbed


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
