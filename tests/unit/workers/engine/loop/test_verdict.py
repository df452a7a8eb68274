"""What trials of a loop that differ mean, as a function of what they have shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal_workers.contract.proofs import ProofOutcome
from shoal_workers.engine.loop.proof import judge
from shoal_workers.engine.loop.verdict import NEWCOMER, NOISY, REPEATED, SPLIT, UNDISTURBED, Trial, verdict

HERE = Path(__file__).parent


def trial(weight: float, *, loss: float = 1.0, counter: float = 1.0, entered: bool = False) -> Trial:
    """Two steps that have moved a weight from 0."""
    losses = {step: {"loss": loss} for step in ((2,) if entered else (1, 2))}
    states = {
        step: {"model": {"w": torch.tensor([0.5 * step * weight])}} for step in ((1, 2) if entered else (0, 1, 2))
    }
    variables = {1: {"counter": (str(Path(__file__)), "plain", {"": counter})}}
    return Trial(entered_after=1, steps_after=1, losses=losses, tracked=states, variables=variables)


def answer(**others: Trial) -> tuple[ProofOutcome, str, dict[str, Any]]:
    trials = {UNDISTURBED: trial(1.0), NEWCOMER: trial(1.0, entered=True), SPLIT: trial(1.0)} | others
    findings = verdict(trials, HERE)
    return *judge(findings), findings


def test_equal_trials_prove_a_loop_and_what_only_counts_is_named() -> None:
    outcome, words, _ = answer(**{NEWCOMER: trial(1.0, entered=True, counter=0.0)})
    assert outcome is ProofOutcome.PROVEN
    assert words.startswith("not tracked, and begin anew") and words.endswith("counter (test_verdict.py)")


def test_a_newcomer_that_differs_names_what_it_began_without() -> None:
    outcome, words, _ = answer(**{NEWCOMER: trial(1.0, loss=1.5, counter=0.0, entered=True)})
    assert outcome is ProofOutcome.REFUSED
    assert "after a restore: in step 2, with a worker that joins after step 1, loss is 1.5 instead of 1" in words
    assert "not the same then: counter (test_verdict.py" in words


def test_two_workers_that_differ_are_named_unless_rounding_alone_differs_as_much() -> None:
    outcome, words, _ = answer(**{SPLIT: trial(1.01)})
    assert outcome is ProofOutcome.REFUSED and "in step 1 model.w differs by 0.005" in words
    noisy = dict(zip(NOISY, (trial(1.01), trial(0.99)), strict=True))
    assert answer(**{SPLIT: trial(1.01)}, **noisy)[0] is ProofOutcome.PROVEN
    noisy = dict(zip(NOISY, (trial(1.00001), trial(0.99999)), strict=True))
    assert answer(**{SPLIT: trial(1.01)}, **noisy)[0] is ProofOutcome.REFUSED


def test_a_loop_that_is_not_the_same_twice_is_neither_proven_nor_refused() -> None:
    outcome, words, _ = answer(**{NEWCOMER: trial(1.0, loss=1.5, entered=True), REPEATED: trial(1.0, loss=1.25)})
    assert outcome is ProofOutcome.UNPROVEN
    assert words == "two runs of it are not the same. In step 1 loss is 1.25 instead of 1"
