"""Which checkpoints may be deleted, and what ended jobs leave behind for how long."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_service.core.retention import EndedJob, Kind, Removal, RetentionRules, choose_deletions, due, why_kept
from shoal_workers.contract.marker import CheckpointName

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
"""Other processes may use the cores, which must not fail the test."""

_NAMES = st.builds(CheckpointName, st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
_SETS = st.sets(_NAMES, max_size=15)


def _chosen(
    committed: set[CheckpointName],
    uncommitted: set[CheckpointName] = frozenset(),  # type: ignore[assignment]
    *,
    keep: int = 2,
    damaged: set[CheckpointName] = frozenset(),  # type: ignore[assignment]
    in_flight: set[CheckpointName] = frozenset(),  # type: ignore[assignment]
    pinned: set[CheckpointName] = frozenset(),  # type: ignore[assignment]
) -> list[CheckpointName]:
    chosen = choose_deletions(committed, uncommitted, keep=keep, damaged=damaged, in_flight=in_flight, pinned=pinned)
    return [deletion.name for deletion in chosen]


def _name(step: int, generation: int = 1, attempt: int = 1) -> CheckpointName:
    return CheckpointName(step, attempt, generation)


@_UNHURRIED
@given(_SETS, _SETS, st.integers(1, 5), _SETS, _SETS)
def test_the_newest_good_ones_stay(
    committed: set[CheckpointName],
    others: set[CheckpointName],
    keep: int,
    damaged: set[CheckpointName],
    in_flight: set[CheckpointName],
) -> None:
    chosen = _chosen(committed, others - committed, keep=keep, damaged=damaged, in_flight=in_flight)
    good = sorted(committed - damaged, reverse=True)
    assert not set(good[:keep]) & set(chosen)
    assert len([name for name in good if name not in chosen]) >= min(keep, len(good))


@_UNHURRIED
@given(_SETS, _SETS, st.integers(1, 5), _SETS, _SETS)
def test_checkpoints_in_flight_and_unknown_directories_are_never_deleted(
    committed: set[CheckpointName],
    others: set[CheckpointName],
    keep: int,
    damaged: set[CheckpointName],
    in_flight: set[CheckpointName],
) -> None:
    chosen = _chosen(committed, others - committed, keep=keep, damaged=damaged, in_flight=in_flight)
    assert not set(chosen) & in_flight
    assert set(chosen) <= committed | others
    assert len(chosen) == len(set(chosen))


@_UNHURRIED
@given(_SETS, _SETS, st.integers(1, 5), _SETS)
def test_after_the_deletions_nothing_more_is_deleted(
    committed: set[CheckpointName], others: set[CheckpointName], keep: int, damaged: set[CheckpointName]
) -> None:
    uncommitted = others - committed
    gone = set(_chosen(committed, uncommitted, keep=keep, damaged=damaged))
    assert _chosen(committed - gone, uncommitted - gone, keep=keep, damaged=damaged) == []


@_UNHURRIED
@given(_SETS, _SETS, st.integers(1, 5))
def test_without_a_good_checkpoint_nothing_is_deleted(
    committed: set[CheckpointName], others: set[CheckpointName], keep: int
) -> None:
    assert _chosen(committed, others - committed, keep=keep, damaged=committed) == []


def test_only_the_newest_keep_remain() -> None:
    assert _chosen({_name(1), _name(2), _name(3)}, keep=2) == [_name(1)]


def test_damaged_ones_do_not_count() -> None:
    committed = {_name(1), _name(2), _name(3), _name(4)}
    assert _chosen(committed, keep=2, damaged={_name(3)}) == [_name(1)]


def test_a_damaged_checkpoint_is_deleted_once_enough_good_ones_are_newer() -> None:
    assert _chosen({_name(1), _name(2), _name(3)}, keep=2, damaged={_name(1)}) == [_name(1)]


def test_an_incomplete_checkpoint_of_a_lost_generation_is_deleted_even_with_a_higher_step() -> None:
    assert _chosen({_name(10, generation=2)}, {_name(12, generation=1)}) == [_name(12, generation=1)]


def test_one_that_may_still_be_being_written_stays() -> None:
    assert _chosen({_name(10)}, {_name(20), _name(5, generation=2)}) == []


def test_reason_holds_the_numbers() -> None:
    deletions = choose_deletions({_name(1), _name(2)}, {_name(1, attempt=0)}, keep=1, damaged=(), in_flight=())
    assert [deletion.reason for deletion in deletions] == [
        "never committed, and step-000000000002-a1-g1 was written later",
        "newer: 1 good checkpoint; kept: 1",
    ]


@_UNHURRIED
@given(_SETS, st.integers(1, 5), _SETS, _SETS)
def test_a_pin_changes_nothing_but_that_its_checkpoint_stays(
    committed: set[CheckpointName], keep: int, damaged: set[CheckpointName], pinned: set[CheckpointName]
) -> None:
    without = _chosen(committed, keep=keep, damaged=damaged)
    assert _chosen(committed, keep=keep, damaged=damaged, pinned=pinned) == [
        one for one in without if one not in pinned
    ]


@_UNHURRIED
@given(_SETS, _SETS, st.booleans())
def test_a_user_cannot_delete_what_is_pinned_or_what_a_job_would_resume_from(
    committed: set[CheckpointName], pinned: set[CheckpointName], is_over: bool
) -> None:
    kept = {one for one in committed if why_kept(one, committed, pinned=pinned, is_over=is_over)}
    newest = {max(committed)} if committed and not is_over else set()
    assert kept == (pinned & committed) | newest


def test_the_reason_names_the_way_out() -> None:
    only, older = _name(20), _name(10)
    assert why_kept(only, [only], pinned=(), is_over=False) == (
        "it is the only one, and the job, which has not ended, would resume from it. Wait for the next one, or cancel "
        "the job first"
    )
    assert why_kept(only, [only, older], pinned=(), is_over=False).startswith("it is the newest one")
    assert why_kept(older, [only, older], pinned=[older], is_over=True) == (
        "it is pinned; `shoal pin JOB 10 --undo` takes the pin away"
    )


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
