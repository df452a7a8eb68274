"""What of an ended job may be deleted, and when."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.retention.ended_jobs import EndedJob, Kind, Removal, RetentionRules, due
from shoal_workers.contract.marker import CheckpointName

DAY = 86_400.0
RULES = RetentionRules(logs_days=1, checkpoints_days=2, series_days=3, events_days=4, jobs_days=5)
ROWS = frozenset({Kind.LOGS, Kind.SERIES, Kind.EVENTS})
OLD, MIDDLE, NEWEST = (CheckpointName(step, 1, 1) for step in (10, 20, 30))
JOB = EndedJob(id="job-a", name="fish", ended_at=0.0, has=ROWS, committed=(OLD, MIDDLE, NEWEST))


def _kinds(job: EndedJob, days: float, rules: RetentionRules = RULES) -> list[Kind]:
    return [one.kind for one in due([job], rules, days * DAY)]


def _checkpoints(job: EndedJob) -> set[str]:
    return {one.name for one in due([job], RULES, 2.5 * DAY) if one.kind is Kind.CHECKPOINT}


def test_each_part_goes_after_its_own_time_and_at_last_the_job() -> None:
    assert _kinds(JOB, 0.9) == []
    assert _kinds(JOB, 1.1) == [Kind.LOGS]
    assert _kinds(JOB, 2.1) == [Kind.CHECKPOINT, Kind.CHECKPOINT, Kind.LOGS]
    assert _kinds(JOB, 3.1) == [Kind.CHECKPOINT, Kind.CHECKPOINT, Kind.LOGS, Kind.SERIES]
    assert _kinds(JOB, 4.1) == [Kind.CHECKPOINT, Kind.CHECKPOINT, Kind.LOGS, Kind.SERIES, Kind.EVENTS]
    assert _kinds(JOB, 5.1) == [Kind.JOB]


def test_the_reason_names_the_setting_and_the_age() -> None:
    [removal] = due([JOB], RULES, 1.1 * DAY)
    reason = "the job ended 1 days ago, and retain_logs_days is 1"
    assert removal == Removal(kind=Kind.LOGS, job_id="job-a", name="fish", reason=reason)


def test_zero_days_are_for_ever() -> None:
    never = RetentionRules(logs_days=0, checkpoints_days=0, series_days=0, events_days=0, jobs_days=0)
    assert _kinds(JOB, 1e6, never) == [] and never.first_days == 0
    assert RULES.first_days == 1


def test_the_newest_good_checkpoint_a_pinned_one_and_one_that_is_needed_stay() -> None:
    assert _checkpoints(JOB) == {str(OLD), str(MIDDLE)}
    assert _checkpoints(replace(JOB, kept=frozenset({OLD}))) == {str(MIDDLE)}
    assert _checkpoints(replace(JOB, damaged=(NEWEST,), committed=(OLD, MIDDLE))) == {str(OLD)}
    needed = replace(JOB, kept=frozenset({MIDDLE}), is_needed=True)
    assert _checkpoints(needed) == {str(OLD)}
    assert Kind.JOB not in _kinds(needed, 5.1), "another job goes on from it"


@given(
    days=st.floats(0, 10),
    steps=st.sets(st.integers(1, 9)),
    pinned=st.sets(st.integers(1, 9)),
    bad=st.sets(st.integers(1, 9)),
)
def test_whatever_the_facts_a_pinned_one_and_the_newest_good_one_are_never_removed(
    days: float, steps: set[int], pinned: set[int], bad: set[int]
) -> None:
    good = sorted(steps - bad)
    job = replace(
        JOB,
        committed=tuple(CheckpointName(step, 1, 1) for step in good),
        damaged=tuple(CheckpointName(step, 1, 1) for step in sorted(steps & bad)),
        kept=frozenset(CheckpointName(step, 1, 1) for step in pinned),
    )
    gone = {CheckpointName.parse(one.name) for one in due([job], RULES, days * DAY) if one.kind is Kind.CHECKPOINT}
    assert not gone & job.kept
    assert not good or CheckpointName(good[-1], 1, 1) not in gone
