"""Conditions, orders and columns of lists of jobs: SQL answers on both databases what plain Python does."""

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kit.plain_conditions import NAMES, matches, random_condition, sort
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.job import JobArchived
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.where.fields import JobDocuments, Source, value_of
from shoal_service.core.where.language import InvalidCondition, Selection, parse, parse_columns, parse_order
from shoal_service.store import Store, histories, job_lists, submissions
from shoal_service.store.errors import InvalidCursor, JobNotEnded
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.records import read_job_num, status_document
from shoal_service.views import JobPatch, OptimizerPatch
from shoal_workers.contract.job import EndReason, JobState, UserFailure

Submit = Callable[..., str]
Begin = Callable[..., Any]
NOW = 20.0
SEED = 7
EVERY_NAME = [name for names in NAMES.values() for name in names]


def found(store: Store, where: str, **more: Any) -> list[str]:
    selection = Selection.parse(where, now=NOW, **more)
    return [job.id for job in store.reading(job_lists.page)(FleetQuery(limit=1000, selection=selection)).items]


@pytest.fixture
def jobs(store: Store, submit: Submit, begin: Begin) -> list[JobDocuments]:
    """Jobs of all kinds; what the store has about each, read from its views."""
    draw = Random(SEED)
    ids = [_some_job(draw, store, submit, begin, num) for num in range(40)]
    return [_documents(store, job_id) for job_id in ids]


def _some_job(draw: Random, store: Store, submit: Submit, begin: Begin, num: int) -> str:
    def maybe(**parts: Any) -> dict[str, Any]:
        return {key: value for key, value in parts.items() if draw.random() < 0.5}

    labels = maybe(
        team=draw.choice(("speech", "Speech", "vision", "é")),
        lr=draw.choice(("3e-4", "1e-3", "0.1", "auto", "1e999")),
        draft="",
    )
    model: dict[str, Any] = {"dim": draw.choice((8, 64)), "act": draw.choice(("a", "B")), "tied": draw.random() < 0.5}
    spec = {
        "task": "package.module:Task",
        "name": f"{draw.choice(('fish', 'a', 'B'))}-{num}",
        "project": draw.choice(("default", "speech")),
        "labels": labels,
        "annotations": maybe(why=draw.choice(("a\nb", "100 %", "é"))),
        "model": {**model, "inner": maybe(depth=draw.choice((1, "deep", None)))},
        "optimizer": {"lr": draw.choice((1e-3, 3e-4, 0.1))},
        "stop": {"steps": draw.choice((1, 100))},
        **maybe(priority=draw.choice((-2, 1, 3)), deterministic=True, finish_by=NOW - 5, precision="bf16"),
        **maybe(parallelism={"tp": 1}, sweep={"name": "x", "limit": 3}),
    }
    job_id = submit(now=float(draw.choice((1, 14, 15, 16))), **spec)
    if draw.random() < 0.7:
        status = maybe(
            status_loss=draw.choice((0.1, 3.0, 1e-3)),
            status_val_loss=draw.choice((0.1, 3.0)),
            status_step=draw.choice((1, 100)),
            status_tokens=None,
            status_incidents=1,
            status_reason="a",
            status_layout="B",
            status_metrics={"accuracy": draw.choice((0.1, 1.0)), "eval acc": 3.0},
            status_val_metrics={"accuracy": 0.1},
            status_goodput=Goodput(at=5.0, seconds={Category.PRODUCTIVE: 1.0}, total=1.0, ratio=1.0),
        )
        begin(job_id).report(JobState.RUNNING, now=15.0, **status)
    elif draw.random() < 0.6:
        store.writing(submissions.request)(job_id, Desired.CANCEL, now=17.0)
        if draw.random() < 0.5:
            store.writing(submissions.archive)(job_id, True, now=18.0)
    return job_id


def _documents(store: Store, job_id: str) -> JobDocuments:
    view = store.get_job(job_id)
    with store.read() as tx:
        num = read_job_num(tx, job_id)
    return JobDocuments(
        columns={
            "num": num,
            "id": view.id,
            "name": view.name,
            "state": view.status.state.value,
            "project": view.spec.project,
            "user": view.spec.user,
            "cluster": view.status.cluster,
            "priority": view.spec.priority,
            "attempt": view.status.attempt,
            "granted_workers": view.status.desired_workers,
            "created_at": view.created_at,
            "updated_at": view.updated_at,
            "started_at": view.started_at,
            "ended_at": view.ended_at,
        },
        status=json.loads(status_document(view.status)),
        spec=view.spec.model_dump(mode="json"),
        labels=view.spec.labels,
        queue_position=None,
        archived=view.archived_at is not None,
    )


@pytest.mark.parametrize(("seed", "num"), [(SEED, 100), pytest.param(SEED + 1, 300, marks=pytest.mark.slow)])
def test_random_conditions_select_what_plain_python_selects(
    store: Store, jobs: list[JobDocuments], seed: int, num: int
) -> None:
    draw = Random(seed)
    num_telling = 0
    for _ in range(num):
        text = random_condition(draw)
        condition = parse(text, NOW)
        assert condition is not None
        expected = [job.columns["id"] for job in reversed(jobs) if matches(condition, job)]
        assert found(store, text, with_archived=True) == expected, text
        num_telling += 0 < len(expected) < len(jobs)
    assert num_telling > num / 3, "most conditions select some jobs and not others"


def test_each_name_orders_as_plain_python_does(store: Store, jobs: list[JobDocuments]) -> None:
    for name in EVERY_NAME:
        for text in (name, f"-{name}"):
            expected = [job.columns["id"] for job in sort(jobs, parse_order(text))]
            assert found(store, "", sort=text, with_archived=True) == expected, text


def test_columns_have_the_values_of_the_documents(store: Store, jobs: list[JobDocuments]) -> None:
    for names in (EVERY_NAME[::2], EVERY_NAME[1::2]):
        _check_columns(store, jobs, ",".join(names))


def _check_columns(store: Store, jobs: list[JobDocuments], text: str) -> None:
    selection = Selection.parse(columns=text, with_archived=True, now=NOW)
    page = store.reading(job_lists.page)(FleetQuery(limit=1000, selection=selection))
    fleet, _ = store.reading(job_lists.fleet)(FleetQuery(selection=selection, limit=200))
    for listed, shown, job in zip(page.items, fleet, reversed(jobs), strict=True):
        known = {field.name: value_of(field, job) for field in parse_columns(text)}
        assert listed.values == shown.values == {name: value for name, value in known.items() if value is not None}


def test_pages_of_an_order_follow_each_other_and_have_cursors_of_their_own(store: Store, submit: Submit) -> None:
    ids = [submit(optimizer={"lr": lr}) for lr in (3e-4, 0.1, 1e-3)]
    selection = Selection.parse(sort="-lr", now=NOW)
    first = store.reading(job_lists.page)(FleetQuery(limit=2, selection=selection))
    assert [job.id for job in first.items] == [ids[1], ids[2]]
    last = store.reading(job_lists.page)(FleetQuery(limit=2, selection=selection), first.next_cursor)
    assert [job.id for job in last.items] == [ids[0]] and last.next_cursor is None
    plain = store.reading(job_lists.page)(FleetQuery(limit=2))
    for wrong, selected in ((first.next_cursor, Selection()), (plain.next_cursor, selection)):
        with pytest.raises(InvalidCursor):
            store.reading(job_lists.page)(FleetQuery(selection=selected), wrong)


def test_a_condition_adds_to_states_projects_and_what_is_visible(store: Store, submit: Submit, begin: Begin) -> None:
    ids = [submit(project=project, optimizer={"lr": 0.1}) for project in ("speech", "vision", "speech")]
    submit(project="speech")
    begin(ids[2])
    selection = Selection.parse("lr > 0.01", now=NOW)
    page = store.reading(job_lists.page)

    def listed(**more: Any) -> list[str]:
        return [job.id for job in page(FleetQuery(selection=selection, **more)).items]

    assert listed(visible={"speech"}) == [ids[2], ids[0]]
    assert listed(visible={"speech"}, states=[JobState.QUEUED]) == [ids[0]]
    assert listed(project="vision") == [ids[1]] and listed(project="vision", visible={"speech"}) == []
    items, total = store.reading(job_lists.fleet)(FleetQuery(selection=selection, visible=frozenset({"vision"})))
    assert ([job.id for job in items], total) == ([ids[1]], 1)


def test_a_setting_is_that_of_the_newest_version(store: Store, submit: Submit) -> None:
    job_id = submit(optimizer={"lr": 0.1})
    store.writing(submissions.patch)(job_id, JobPatch(optimizer=OptimizerPatch(lr=0.01)), if_match=None, now=2.0)
    assert (found(store, "lr == 0.1"), found(store, "lr == 0.01")) == ([], [job_id])


@pytest.mark.parametrize(
    "notes, word, is_found",
    [
        ("a Zebra_1 there", "zebra_1", True),
        ("a zebra 1 there", "zebra_1", False),
        ("zebra\nfinch", "finch", True),
        ('say "no" \\ or', '"NO" \\', True),
        ("größe", "größe", True),
        ("größe", "GRÖSSE", False),
        ("lion", "notes", False),
    ],
)
def test_a_text_is_found_in_its_own_setting_only(
    store: Store, submit: Submit, notes: str, word: str, is_found: bool
) -> None:
    job = submit(name="zebra_1-finch", annotations={"notes": notes})
    quoted = word.replace("\\", "\\\\").replace('"', '\\"')
    assert found(store, f'annotation.notes ~ "{quoted}"') == ([job] if is_found else [])


def test_an_archived_job_is_hidden_until_it_is_asked_for(store: Store, submit: Submit) -> None:
    job_id, other = submit(), submit()
    with pytest.raises(JobNotEnded, match="cannot be archived before it has ended"):
        store.writing(submissions.archive)(job_id, True, now=2.0)
    store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)
    state = store.get_job(job_id).status.state
    archived = store.writing(submissions.archive)(job_id, True, now=3.0)
    assert (archived.archived_at, archived.status.state) == (3.0, state)
    assert store.writing(submissions.archive)(job_id, True, now=4.0).archived_at == 3.0, "again is no change"
    assert found(store, "") == [other] and found(store, "step >= 0") == [other]
    assert found(store, "", with_archived=True) == [other, job_id]
    assert found(store, "archived") == [job_id] and found(store, "archived or not archived") == [other, job_id]
    fleet, total = store.reading(job_lists.fleet)(FleetQuery())
    assert ([job.id for job in fleet], total) == ([other], 1)
    back = store.writing(submissions.archive)(job_id, False, now=5.0)
    assert back.archived_at is None and found(store, "") == [other, job_id]
    events = [one.data for one in store.reading(histories.read_events)(job_id) if one.type == JobArchived.type]
    assert [one["archived"] for one in events] == [True, False]


def test_a_job_that_goes_on_is_no_longer_archived(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(retry={"max_failures": 0})
    failure = UserFailure(type="ValueError", message="no", traceback="", phase="forward", ranks=(0,), step=1)
    begin(job_id).report(end=AttemptEnd(reason=EndReason.USER_ERROR, message="no", step=1, failure=failure))
    store.writing(submissions.archive)(job_id, True, now=3.0)
    again = store.writing(submissions.retry)(job_id, now=4.0)
    assert (again.status.state, again.archived_at) == (JobState.QUEUED, None)


def test_the_names_of_these_tests_are_of_every_source() -> None:
    others = {Source.SERIES}  # no document has a whole curve; the next test is about them
    assert {parse_columns(name)[0].source for name in EVERY_NAME} == set(Source) - others


def test_a_run_that_has_diverged_is_found_by_its_whole_curve(store: Store, submit: Submit, begin: Begin) -> None:
    curves = {
        "calm": [4.0, 3.0, 2.0],
        "spiked": [4.0, 300.0, 2.0],
        "diverged": [4.0, 30.0, math.nan, math.nan],
        "silent": [math.nan, math.nan],
        "late": [math.nan, 3.0, 2.0],
    }
    ids = {name: submit(name=name) for name in (*curves, "waits")}
    for name, losses in curves.items():
        rest = {
            "at": 1.0,
            "grad_norm": 1.0,
            "lr": 1.0,
            "tokens_per_s": 1.0,
            "step_s": 1.0,
            "world_size": 1,
            "generation": 1,
        }
        points = tuple(SeriesPoint(step=step, loss=loss, **rest) for step, loss in enumerate(losses, start=1))
        begin(ids[name]).report(series=points)
    stopped = submit(name="stopped", retry={"max_failures": 0})
    attempt = begin(stopped)
    attempt.report(series=(SeriesPoint(step=1, loss=4.0, **rest),), status_step=1)
    attempt.report(status_step=1, end=AttemptEnd(reason=EndReason.NON_FINITE, message="step 2: loss nan", step=1))
    ids["stopped"] = stopped
    cases = {
        "max(loss) > 100": ["spiked"],
        "min(loss) <= 2 and MAX( loss ) < 100": ["calm", "late"],
        "first(step where loss is nan)": ["diverged", "stopped"],
        "first(step where loss is nan) == 3": ["diverged"],
        "first(step where loss is nan) == 2": ["stopped"],
        "first(step where grad_norm is nan) == 2": ["stopped"],
        "first(step where lr is nan)": [],
        "not max(loss) > 0": ["silent", "waits"],
        "max(val_loss) == null": list(ids),
    }
    wrong = {
        where: names for where, names in cases.items() if set(found(store, where)) != {ids[name] for name in names}
    }
    assert wrong == {}
    page = store.reading(job_lists.page)(
        FleetQuery(
            limit=10,
            selection=Selection.parse(
                "name == 'diverged'", "-max(loss)", "max(loss),first(step where loss is nan)", now=NOW
            ),
        )
    )
    assert page.items[0].values == {"max(loss)": 30.0, "first(step where loss is nan)": 3}
    for text in ("max(state) > 1", "max(loss > 1", "first(loss) > 1", "max > 1"):
        with pytest.raises(InvalidCondition):
            parse(text, NOW)
