"""The ledger of islands: what has arrived, what a round was closed with, and who reads that he missed one."""

from collections.abc import Callable
from typing import Any

import pytest

from kit import island_rounds as kit
from kit.scrapes import scrape, value_of
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import IslandMissedRound
from shoal_service.core.islands import close_round
from shoal_service.store import JobNotFound, Lease, Store, histories, island_rounds, job_deletion, submissions
from shoal_service.store.errors import IslandsNotEnded, RequestConflict
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.store.metrics_snapshot import LiveJobs
from shoal_service.telemetry.catalogue import IslandStanding, LiveJob
from shoal_service.views import CheckpointView
from shoal_workers.contract.checks.spec_errors import SpecError
from shoal_workers.contract.islands import IslandsSpec, Member, RoundDecision
from shoal_workers.contract.job import EndReason, JobState

Submit = Callable[..., str]
Begin = Callable[..., Any]


@pytest.fixture
def islands(submit: Submit) -> list[str]:
    """Three islands, by index; none has begun."""
    first = submit(islands={"num": 3, "index": 0})
    return [first, *(submit(islands={"num": 3, "index": index, "run": first}) for index in (1, 2))]


def _missed(store: Store, job_id: str) -> list[dict[str, Any]]:
    events = store.reading(histories.read_events)(job_id)
    return [event.data for event in events if event.type == IslandMissedRound.type]


def _note(store: Store, lease: Lease, run: str, number: int, *contributions: Any, now: float) -> dict[Any, float]:
    return store.writing(island_rounds.note, lease.epoch)(run, number, contributions, now=now)


def test_island_0_is_its_own_run(store: Store, islands: list[str]) -> None:
    specs = [store.get_job(job_id).spec.islands for job_id in islands]
    assert [(spec.index, spec.run) for spec in specs if spec] == [(0, islands[0]), (1, islands[0]), (2, islands[0])]


@pytest.mark.parametrize(
    ("path", "changes", "islands_changes"),
    [
        ("islands.run", {}, {"run": "job-none"}),
        ("islands.run", {"project": "theirs"}, {}),
        ("islands.num", {}, {"num": 4}),
        ("islands.index", {}, {}),
    ],
    ids=["no job", "another project", "another number", "trained by another job"],
)
def test_a_job_joins_only_islands_of_its_project_that_lack_it(
    submit: Submit, islands: list[str], path: str, changes: dict[str, Any], islands_changes: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as refused:
        submit(islands={"num": 3, "index": 1, "run": islands[0], **islands_changes}, **changes)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_a_job_replaces_an_island_that_has_ended(submit: Submit, islands: list[str], begin: Begin) -> None:
    begin(islands[1]).report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=9))
    assert submit(islands={"num": 3, "index": 1, "run": islands[0]})


def test_another_job_is_no_run(submit: Submit, job_id: str, islands: list[str]) -> None:
    for run in (job_id, islands[1]):
        with pytest.raises(SpecError, match="has no job of an island 0"):
            submit(islands={"num": 3, "index": 1, "run": run})


def test_of_each_island_the_first_contribution_and_its_time_stay(
    store: Store, lease: Lease, islands: list[str]
) -> None:
    first, later, other = kit.contribution(1, step=50), kit.contribution(1, step=60), kit.contribution(0)
    assert _note(store, lease, islands[0], 0, first, now=10.0) == {first: 10.0}
    assert _note(store, lease, islands[0], 0, later, other, now=11.0) == {first: 10.0, other: 11.0}
    assert _note(store, lease, islands[0], 0, now=12.0) == {first: 10.0, other: 11.0}
    [row] = store.reading(island_rounds.rounds)(islands[0])
    assert (row.round, row.decision, row.closed_at) == (0, None, None)
    assert [(sent.island, sent.step, sent.arrived_at) for sent in row.arrived] == [(1, 50, 10.0), (0, 50, 11.0)]


def test_a_closed_round_does_not_change(store: Store, lease: Lease, islands: list[str]) -> None:
    decision = kit.close(store, lease.epoch, islands[0], 0, [0, 2], now=10.0)
    other = RoundDecision(round=0, members=(Member(island=1, weight=1.0, step=50, directory="island-1/step-50"),))
    store.writing(island_rounds.close, lease.epoch)(islands[0], other, now=20.0)
    arrived = _note(store, lease, islands[0], 0, kit.contribution(1), now=21.0)
    assert {contribution.island for contribution in arrived} == {0, 2}
    assert store.reading(island_rounds.newest_decision)(islands[0]) == decision
    [row] = store.reading(island_rounds.rounds)(islands[0])
    assert (row.decision, row.closed_at) == (decision, 10.0)


def test_rounds_are_listed_newest_first_and_runs_are_apart(
    store: Store, lease: Lease, islands: list[str], submit: Submit
) -> None:
    other = submit(islands={"num": 1, "index": 0})
    for number in range(4):
        kit.close(store, lease.epoch, islands[0], number, [0, 1, 2])
    kit.close(store, lease.epoch, other, 0, [0])
    assert [row.round for row in store.reading(island_rounds.rounds)(islands[0])] == [3, 2, 1, 0]
    assert [row.round for row in store.reading(island_rounds.rounds)(islands[0], limit=2)] == [3, 2]
    assert [row.round for row in store.reading(island_rounds.rounds)(other)] == [0]


@pytest.mark.parametrize(("last", "mean"), [(3.0, 2.8), (None, None)], ids=["known", "all skipped"])
def test_the_loss_of_a_round_is_the_mean_of_its_members_by_tokens(
    store: Store, lease: Lease, islands: list[str], last: float | None, mean: float | None
) -> None:
    sent = [kit.contribution(0, tokens=100, loss=2.0), kit.contribution(1, tokens=400, loss=last)]
    with store.write(lease.epoch) as tx:
        arrived = island_rounds.note(tx, islands[0], 0, [*sent, kit.contribution(2, loss=None)], now=1.0)
        [row] = island_rounds.rounds(tx, islands[0])
        assert row.loss is None, "it is open"
        decision = close_round(0, IslandsSpec(num=3), {island: arrived[island] for island in sent}, (0, 1), 2.0)
        assert decision is not None
        island_rounds.close(tx, islands[0], decision, now=2.0)
        [row] = island_rounds.rounds(tx, islands[0])
    assert row.loss == (None if mean is None else pytest.approx(mean))


def test_an_island_that_trains_and_missed_a_round_has_one_event_of_it(
    store: Store, lease: Lease, islands: list[str], begin: Begin
) -> None:
    """Island 0 is a member, island 1 trains without being one, island 2 has not begun."""
    for job_id in islands[:2]:
        begin(job_id).report()
    decision = kit.close(store, lease.epoch, islands[0], 0, [0])
    store.writing(island_rounds.close, lease.epoch)(islands[0], decision, now=11.0)
    assert [_missed(store, job_id) for job_id in islands] == [[], [{"round": 0, "island": 1, "members": [0]}], []]
    kit.close(store, lease.epoch, islands[0], 1, [0, 1])
    kit.close(store, lease.epoch, islands[0], 2, [0])
    assert [event["round"] for event in _missed(store, islands[1])] == [0, 2]


def test_an_island_that_has_ended_misses_nothing(store: Store, lease: Lease, islands: list[str], begin: Begin) -> None:
    attempt = begin(islands[1])
    attempt.report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=9))
    kit.close(store, lease.epoch, islands[0], 0, [0])
    assert _missed(store, islands[1]) == []


def test_the_ledger_goes_with_the_job_of_island_0(store: Store, lease: Lease, islands: list[str], begin: Begin) -> None:
    """It cannot be deleted before the others have ended, and each of the others can."""
    kit.close(store, lease.epoch, islands[0], 0, [0, 1])
    end = AttemptEnd(reason=EndReason.FINISHED, message="", step=9)
    for job_id in islands[:2]:
        begin(job_id).report(end=end)
    store.writing(job_deletion.begin)(islands[1], DeletionRequest(root="/c/job"), now=30.0)
    with pytest.raises(IslandsNotEnded, match=rf"islands that have not ended \(1\).*shoal cancel {islands[2]}"):
        store.writing(job_deletion.begin)(islands[0], DeletionRequest(root="/c/job"), now=30.0)
    begin(islands[2]).report(end=end)
    store.writing(job_deletion.begin)(islands[0], DeletionRequest(root="/c/job"), now=30.0)
    store.writing(job_deletion.finish)(islands[0], now=31.0)
    assert store.reading(island_rounds.newest_decision)(islands[0]) is None
    with pytest.raises(JobNotFound):
        _note(store, lease, islands[0], 1, kit.contribution(1), now=31.0)


def test_no_island_goes_on_or_joins_while_the_job_of_island_0_is_deleted(
    store: Store, lease: Lease, islands: list[str], begin: Begin, submit: Submit
) -> None:
    saved = CheckpointView(url="/data/x", state="committed", attempt=1, generation=1, step=9)
    for job_id in islands:
        end = AttemptEnd(reason=EndReason.FINISHED, message="", step=9)
        begin(job_id).report(checkpoints=(saved,), end=end)
    store.writing(job_deletion.begin)(islands[0], DeletionRequest(root="/c/job"), now=30.0)
    for _ in ("deleting", "deleted"):
        with pytest.raises(RequestConflict, match=f"{islands[0]}, the job of island 0, is deleted.*Begin other"):
            store.writing(submissions.extend)(islands[1], steps=5000, now=31.0)
        with pytest.raises(SpecError, match="has no job of an island 0"):
            submit(islands={"num": 3, "index": 1, "run": islands[0]})
        store.writing(job_deletion.finish)(islands[0], now=32.0)


def test_an_island_does_not_go_on_before_rounds_that_are_deleted(
    store: Store, lease: Lease, islands: list[str], begin: Begin
) -> None:
    """It was no member of the rounds that the others are long past."""
    committed = {"url": "/data/x", "state": "committed", "attempt": 1, "generation": 1}
    attempts = [begin(job_id) for job_id in islands]
    for attempt, step in zip(attempts, (200, 40, 200), strict=True):
        attempt.report(checkpoints=(CheckpointView(step=step, **committed),))
    for number in range(3):
        kit.close(store, lease.epoch, islands[0], number, [0, 2])
    for attempt in attempts[1:]:
        attempt.report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=200))
    with pytest.raises(RequestConflict, match="it needs the rounds from 0 on, and those before 2 are deleted"):
        store.writing(submissions.extend)(islands[1], steps=5000, now=33.0)
    assert store.writing(submissions.extend)(islands[2], steps=5000, now=33.0).status.state is JobState.QUEUED


def test_metrics_say_how_an_island_stands(store: Store, lease: Lease, islands: list[str], begin: Begin) -> None:
    for job_id in islands:
        begin(job_id).report()
    before = scrape(store)
    assert not [name for name, _ in before if "island" in name]
    kit.close(store, lease.epoch, islands[0], 0, [0, 1])
    kit.close(store, lease.epoch, islands[0], 1, [0])
    _note(store, lease, islands[0], 2, kit.contribution(0, waited_s=2.5), now=12.0)
    samples = scrape(store)
    names = ("rounds_total", "rounds_missed", "waited_seconds")
    values = [[value_of(samples, f"shoal_job_island_{name}", job_id=job_id) for name in names] for job_id in islands]
    assert values == [[2, 0, 2.5], [2, 1, 0.5], [2, 2, None]]


def test_an_island_misses_the_rounds_of_its_own_pairs_alone(
    store: Store, lease: Lease, islands: list[str], begin: Begin
) -> None:
    for job_id in islands:
        begin(job_id).report()
    kit.close(store, lease.epoch, islands[0], 0, [0], of=(0, 2))
    kit.close(store, lease.epoch, islands[0], 1, [1], of=(1,))
    assert [len(_missed(store, job_id)) for job_id in islands] == [0, 0, 1]
    samples = scrape(store)
    assert [value_of(samples, "shoal_job_island_rounds_missed", job_id=job_id) for job_id in islands] == [0, 0, 1]


def test_the_rounds_of_many_other_pairs_hide_no_round_that_an_island_missed(
    store: Store, lease: Lease, submit: Submit, begin: Begin
) -> None:
    run = submit(islands={"num": 24, "index": 0, "topology": "pairs"})
    begin(run).report()
    kit.close(store, lease.epoch, run, 0, [23], of=(0, 23))
    for number in range(1, 30):
        kit.close(store, lease.epoch, run, number, [1], of=(1,))
    assert value_of(scrape(store), "shoal_job_island_rounds_missed", job_id=run) == 1


def test_what_is_kept_of_a_job_between_two_scrapes_follows_the_ledger(
    store: Store, lease: Lease, islands: list[str], begin: Begin
) -> None:
    """A closed round changes no column of a job that is a member, and no row is parsed again."""
    begin(islands[0]).report()
    live = LiveJobs()

    def read() -> LiveJob:
        [job] = store.reading(live.read)(now=10.0)
        return job

    first = read()
    assert first.island is None and read() is first
    kit.close(store, lease.epoch, islands[0], 0, [0, 1])
    second = read()
    assert second.island == IslandStanding(rounds=1, rounds_missed=0, waited_s=0.5)
    assert read() is second and second.spec is first.spec
