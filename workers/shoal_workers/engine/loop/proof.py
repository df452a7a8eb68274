"""Proves a loop while its first two steps are computed: that it trains the model of one process, with two workers and
after a restore.

    rank 0    a new job begins: fork --+--> trials, each in a fork of its own (trials.py): two steps in one process;
              step 1                   |    a newcomer that goes on after step 1; two ranks
              step 2, a save      <----+--- proven, refused with what differs, or not known and why
              step 3

All ranks wait in step 3 until rank 0 has the answer, at most PATIENCE_S. No checkpoint is saved before. Trials compute
on the CPU, and leave no trace (process/confined.py). What is proven or refused is remembered, as the proofs of tasks
are. Called by `LoopProgram` and by `StepBoundary`, on the training thread of rank 0.
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
from shoal_workers.engine.loop.trials import Crashed, Plan, TrialEngine, find
from shoal_workers.engine.loop.verdict import NEWCOMER, SPLIT, UNDISTURBED, WITH_TWO
from shoal_workers.engine.process.confined import confine
from shoal_workers.engine.proof.before_training import find_proof, keep_proof

PATIENCE_S = 60.0
_NUM_STEPS = 2
_MOST_MICRO_BATCHES = 2
"""Micro-batches of each half of a step, at most."""
_POLL_S = 0.2
_MAX_NAMES = 8


class LoopProof:
    """The proof of a job whose first generation has this worker as rank 0."""

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
        if self._answer is None:
            self._directory = Path(tempfile.mkdtemp(prefix="proof-", dir=get_temp_dir()))
            self._started_mono = time.monotonic()
            self._begin(function, make_engine)

    def observe(self, step: int, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """A step is complete, and not reported as saved. Raises ValueError if the loop is refused."""
        if step >= _NUM_STEPS:
            self.settle(check, note)

    def settle(self, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """Waits for the answer. Raises as `observe` does, again and again."""
        if self._answer is None:
            self._answer = self._wait(check, note)
            self.close()
            if self._answer.outcome is ProofOutcome.UNPROVEN:
                self._say(f"the loop was not proven: {self._answer.words}")
            else:
                keep_proof(self._spec, self._answer)
        if self._answer.outcome is ProofOutcome.REFUSED:
            raise ValueError(self._answer.words)

    def close(self) -> None:
        """Ends the trials: there is an answer, or the group has ended before."""
        if self._pid:
            if self._answer is None:
                self._say("the loop was not proven: its first group has ended before its trials")
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
                while True:  # what trials have left is a child of this process now
                    os.waitpid(-self._pid, 0)
            os.close(self._answers)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._pid = 0

    def _begin(self, function: Callable[[Run], None], make_engine: Callable[..., TrialEngine]) -> None:
        parent = os.getpid()
        self._answers, end = os.pipe()
        with warnings.catch_warnings():
            # Python warns of other threads, which hold no lock that a trial needs: loaders fork as well.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                confine(self._directory, parent=parent, kept=end)
                os.write(end, json.dumps(_found(self._plan(function, make_engine))).encode())
            except BaseException as error:
                os.write(end, json.dumps([ProofOutcome.UNPROVEN, f"{type(error).__name__}: {error}"]).encode())
            finally:
                os.write(end, b"\n")
                os._exit(0)
        os.close(end)

    def _plan(self, function: Callable[[Run], None], make_engine: Callable[..., TrialEngine]) -> Plan:
        return Plan(
            spec=reduced(self._spec, self._directory, entered_after=1, on_gpu=False, in_memory=False),
            function=function,
            make_engine=make_engine,
            directory=self._directory,
            entered_after=1,
            steps_after=_NUM_STEPS - 1,
            most_micro_batches=_MOST_MICRO_BATCHES,
            is_silent=True,
            on_thread=lambda call, _: call(),
        )

    def _wait(self, check: Callable[[], None], note: Callable[[str], None]) -> LayoutProof:
        deadline_mono, text = time.monotonic() + PATIENCE_S, b""
        while not text.endswith(b"\n"):
            check()
            note("proving the loop")
            if select.select([self._answers], [], [], _POLL_S)[0]:
                if not (more := os.read(self._answers, 1 << 16)):
                    return self._proof(ProofOutcome.UNPROVEN, "its trials were killed")
                text += more
            elif time.monotonic() > deadline_mono:
                spent_s = time.monotonic() - self._started_mono
                return self._proof(ProofOutcome.UNPROVEN, f"its trials have taken more than {spent_s:.0f} s")
        outcome, words = json.loads(text)
        return self._proof(ProofOutcome(outcome), words)

    def _proof(self, outcome: ProofOutcome, words: str) -> LayoutProof:
        seconds = time.monotonic() - self._started_mono
        return LayoutProof(layout=self._layout, outcome=outcome, words=words, seconds=seconds)


def reduced(spec: JobSpec, directory: Path, *, entered_after: int, on_gpu: bool, in_memory: bool) -> JobSpec:
    """Returns the same loop with a checkpoint after that step, for a trial. `in_memory`: with a copy after each one."""
    return spec.model_copy(
        update={
            "worker": spec.worker if on_gpu else spec.worker.model_copy(update={"gpus": 0}),
            "checkpoint": spec.checkpoint.model_copy(
                update={"every_s": None, "every_steps": entered_after, "url": str(directory)}
            ),
            "snapshot": spec.snapshot.model_copy(update={"enabled": in_memory, "budget": 1.0}),
        }
    )


def _found(plan: Plan) -> tuple[ProofOutcome, str]:
    torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork
    names = [UNDISTURBED, NEWCOMER, *([SPLIT] if plan.spec.elasticity.max_workers > 1 else [])]
    try:
        findings, _ = find(plan, names, lambda _: None)
    except Crashed as crashed:
        return ProofOutcome.UNPROVEN, f"a trial has ended: {crashed}"
    if (failed := findings.get("failed")) is not None:
        entered = failed.get("after", "")
        is_error = "sentence" in failed  # of the program; else the trial was not made
        text = (
            f"a trial has failed{entered and f', {entered}'}: {failed['sentence']}" if is_error else failed["message"]
        )
        return ProofOutcome.UNPROVEN, text
    return judge(findings)


def judge(findings: Mapping[str, Any]) -> tuple[ProofOutcome, str]:
    """What a verdict on a loop's trials means for its job, and the words."""
    if not findings["differences"]:
        return ProofOutcome.PROVEN, ""
    [first, *_] = findings["differences"]
    differs = (
        f"{first['what']} {first['words'] if first['words'].startswith(('differs', 'has')) else 'is ' + first['words']}"
    )
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
    names = [f"{found['path']} ({found['place']})" for found in findings["untracked"]]
    names += findings["suspects"]
    carriers = f" Not tracked, and not the same then: {', '.join(names[:_MAX_NAMES])}." if names else ""
    return ProofOutcome.REFUSED, (
        f"this loop trains another model after a restore: in step {first['step']}, with {first['trial']}, {differs}."
        f"{carriers} Each rank has its own, and a new worker begins without it. Two ways out: track an object that has "
        "it in its state_dict(), and change it after the update, alike on all ranks (by run.loss or run.step); or keep "
        "it in a buffer of a tracked module that checkpoints hold."
    )
