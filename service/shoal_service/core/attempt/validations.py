"""What follows from a validation: the best ones so far, and a job that stops early. Called by `reports`.

The engine judges the same reports in the same way and stops all ranks by itself; here the result is recorded for the
next group, for people, and for retention.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.generations import StoppedEarly, ValidationNotJudged
from shoal_workers.contract.course.best import LOSS, is_exhausted, judge, why_exhausted
from shoal_workers.contract.worker_reports import ValidationReport


def judged(turn: Turn, item: ValidationReport) -> None:
    spec, before = turn.target.spec, turn.history.standing
    rule = spec.validation
    standing = judge(before, rule, spec.checkpoint.keep_best, step=item.step, loss=item.loss, metrics=item.metrics)
    turn.history = replace(turn.history, standing=standing)
    needs_it = rule.patience is not None or spec.checkpoint.keep_best > 0
    if needs_it and rule.metric != LOSS and rule.metric not in item.metrics:
        known = tuple(sorted(item.metrics))
        turn.emit(ValidationNotJudged(step=item.step, metric=rule.metric, known=known))
    if is_exhausted(standing, rule):
        turn.history = replace(turn.history, total_steps=max(item.step, turn.progress.step))
        if not is_exhausted(before, rule):
            turn.emit(StoppedEarly(step=item.step, reason=why_exhausted(standing, rule)))
