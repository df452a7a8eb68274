"""Tables, curves and bars for terminals of any width, the page of a job, and what is said of a planned model."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from kit.worlds.written_service import SPEC
from shoal_api.cli.render.fleet import render_queue, render_top, rows_that_fit
from shoal_api.cli.render.jobs import render_dry_run, render_job, render_jobs
from shoal_api.cli.render.plan import render_plan
from shoal_api.cli.render.terminal import draw_sparkline, draw_worker_bar, format_steps, new_table, split_width
from shoal_service.control.planning import PlanRequest, answer
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.fleet_views import ClusterView, DryRun, PlannedSize, QueuedJob, QueueView
from shoal_service.planner.gpus import PROFILES
from shoal_service.views import JobStatus, JobSummary, JobView, QueuePlace
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import JobState, UserFailure

NOW = 1_700_000_000.0
ID = "job-0123456789ab"
REASON = (
    "needs 4 workers of 2 CPUs each; 3 CPUs are free on 10.0.0.7 and 1 on 10.0.0.8. Jobs of priority 50 hold the rest; "
    "a smaller elasticity.min_workers would start at once"
)
SCRIPT = parse_spec({"name": "mine", "script": {"file": "train.py", "args": ["--note", "a b"]}})
SUMMARY = JobSummary(
    id=ID,
    name="language-model-pretraining",
    state=JobState.RUNNING,
    step=123_456,
    total_steps=200_000,
    loss=2.5,
    tokens_per_s=1_234_567.0,
    eta_s=4_000.0,
    workers=3,
    desired_workers=4,
    project="speech-recognition",
    user="ada.lovelace",
    note=REASON,
    created_at=NOW - 100,
    updated_at=NOW,
)
QUEUE = QueueView(
    items=(
        QueuedJob(
            job_id=ID,
            name="language-model-pretraining",
            project="speech-recognition",
            user="ada.lovelace",
            priority=10,
            submitted_at=NOW - 100,
            place=QueuePlace(position=1, reason=REASON, decided_at=NOW),
        ),
    ),
    num_queued=1,
    projects=(),
)
CLUSTER = ClusterView(
    connected=True,
    address="",
    nodes=(),
    cpus_total=4.0,
    cpus_free=0.0,
    gpus_total=0.0,
    gpus_free=0.0,
    owner="",
    epoch=1,
)


def _shown(width: int, *parts: Any) -> list[str]:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_queue_and_top_are_readable_at_any_width(width: int) -> None:
    for page in (render_queue(QUEUE, NOW, {}), [render_top([SUMMARY], CLUSTER, NOW)], [render_jobs([SUMMARY], NOW)]):
        lines = _shown(width, *page)
        assert max(len(line.rstrip()) for line in lines) <= width
        assert any(ID in line for line in lines), "the id is whole"
        assert len(lines) < 16, "nothing is squeezed into a column of a few letters"
    page = " ".join(" ".join(_shown(width, *render_queue(QUEUE, NOW, {}))).split())
    assert REASON in page and "ada.lovelace" in page


def test_what_does_not_fit_stands_under_its_row_with_its_name() -> None:
    table = new_table("id", ">step", "where", "why")
    table.add_row("a", "10", "-", "b" * 30)
    assert _shown(60, table)[0].split() == ["id", "step", "where", "why"]
    narrow = [line.split() for line in _shown(30, table)]
    assert narrow[:2] == [["id", "step", "where"], ["a", "10", "-"]] and narrow[2][0] == "why"
    assert not any("where -" in line for line in _shown(12, table)), "what is not known is left out"


def test_a_narrow_screen_has_room_for_fewer_jobs() -> None:
    assert rows_that_fit(200, 30) > rows_that_fit(80, 30) >= 1 and rows_that_fit(80, 3) == 1


@pytest.mark.parametrize(("ranks", "words"), [((), "step 4"), ((2,), "step 4, rank 2"), ((0, 2), "step 4, ranks 0, 2")])
def test_a_failure_names_its_ranks_if_it_has_some(ranks: tuple[int, ...], words: str) -> None:
    failure = UserFailure(type="ValueError", message="no", traceback="", phase="forward", ranks=ranks, step=4)
    [line] = [line for line in _shown(80, render_job(_job(failure=failure), (), NOW)) if "in forward" in line]
    assert line.split("in forward, ")[1].strip() == words


def test_a_failure_of_a_script_names_no_step_that_it_has_not_reported() -> None:
    failure = UserFailure(type="ExitStatus", message="no", traceback="", phase="script", ranks=(1,), step=0)
    [line] = [line for line in _shown(80, render_job(_script(failure=failure), (), NOW)) if "in script" in line]
    assert line.split() == ["failure", "in", "script,", "rank", "1"]


@pytest.mark.parametrize(("tokens", "unit"), [(320, "samples/s"), (320 * 128, "tokens/s")])
def test_a_task_without_tokens_trains_on_samples(tokens: int, unit: str) -> None:
    page = " ".join(_shown(80, render_job(_job(step=10, tokens=tokens, tokens_per_s=5.0), (), NOW)))
    assert unit in page


def test_what_a_script_has_not_reported_reads_so_and_its_command_is_shown() -> None:
    status = {
        "state": JobState.RUNNING,
        "attempt": 1,
        "generation": 1,
        "workers": 2,
        "desired_workers": 2,
        "incidents": 1,
    }
    rows = dict(
        line.split(maxsplit=1) for line in _shown(100, render_job(_script(**status), (), NOW)) if "  " in line.strip()
    )
    assert rows["command"].strip() == "train.py --note 'a b', as by torchrun"
    for name in ("step", "loss", "tokens/s", "ETA"):
        assert rows[name].strip() == "not reported", name
    assert rows["incidents"].strip() == "1, lost steps not reported"
    assert "layout" not in rows and "checkpoint" not in rows


def test_what_a_script_has_reported_is_shown_and_a_series_may_have_gaps() -> None:
    gaps = {"at": 0, "grad_norm": math.nan, "lr": math.nan, "tokens_per_s": math.nan, "step_s": 1, "generation": 1}
    points = [SeriesPoint(step=step, loss=5.0 - step, world_size=2, **gaps) for step in range(1, 4)]
    status = {
        "state": JobState.RUNNING,
        "attempt": 1,
        "generation": 1,
        "step": 3,
        "step_at": NOW,
        "loss": 2.0,
        "steps_lost": 1,
    }
    rows = dict(
        line.split(maxsplit=1)
        for line in _shown(100, render_job(_script(**status), points, NOW))
        if "  " in line.strip()
    )
    assert (rows["step"].strip(), rows["tokens/s"].strip()) == ("3", "not reported")
    assert rows["loss"].split() == ["2.0000", "█▅▁"]
    before = " ".join(_shown(100, render_job(_script(state=JobState.STARTING, attempt=1), (), NOW)))
    assert "not reported" not in before and " step " not in before, "it has not begun"
    ended = {**status, "state": JobState.SUCCEEDED, "loss": None}
    after = [line.split()[0] for line in _shown(100, render_job(_script(**ended), (), NOW)) if "not reported" in line]
    assert after == ["loss"], "nothing happens now"


def test_the_page_of_a_job_that_has_ended_says_each_thing_once() -> None:
    """It said `CANCELLED cancelled`, `workers 0/0`, and an error twice."""
    page = _shown(100, render_job(_job(state=JobState.CANCELLED, reason="cancelled"), (), NOW))
    lines = [" ".join(line.split()) for line in page]
    assert "state CANCELLED" in lines and not any("0/0" in line for line in lines)
    assert any(line.startswith("workers min ") for line in lines), "what it asks for"
    failure = UserFailure(
        type="KeyError", message="'square'", traceback="KeyError: 'square'", phase="script", ranks=(), step=0
    )
    status = {"state": JobState.FAILED, "reason": "user_error", "message": f"Your code raised {failure.sentence}."}
    page = _shown(100, render_job(_job(failure=failure, **status), (), NOW))
    assert " ".join(" ".join(page).split()).count(failure.sentence) == 2, "the message, and the traceback's last line"
    listed = SUMMARY.model_copy(update={"state": JobState.SUCCEEDED, "reason": "finished"})
    assert "finished" not in " ".join(_shown(200, render_jobs([listed], NOW)))
    assert "user_error" in " ".join(_shown(200, render_jobs([listed.model_copy(update={"reason": "user_error"})], NOW)))


def test_a_list_shows_no_step_of_a_job_that_has_reported_none() -> None:
    silent = SUMMARY.model_copy(update={"step": 0, "total_steps": None, "loss": None, "tokens_per_s": None})
    for page in (render_jobs([silent], NOW), render_top([silent], CLUSTER, NOW)):
        assert " 0 " not in " ".join(_shown(300, page)).partition("RUNNING")[2].partition("3/4")[0]
    assert format_steps(0, 400) == "0/400" and format_steps(0, None) == "-" and format_steps(7, None) == "7"


def test_a_dry_run_of_a_script_shows_its_command_and_no_layout() -> None:
    planned = (PlannedSize(workers=1, layout="dp1", num_idle=0, reason=""),)
    spec = SCRIPT.model_copy(update={"elasticity": ElasticitySpec(min_workers=2, max_workers=8)})
    page = " ".join(_shown(200, render_dry_run(DryRun(spec=spec, note="", layouts=planned, start=None), NOW)))
    assert "train.py --note 'a b', as by torchrun" in page and "2 to 8" in page and "dp1" not in page


def _script(**status: Any) -> JobView:
    return _job(**status).model_copy(update={"spec": SCRIPT})


def _job(**status: Any) -> JobView:
    return JobView(
        id=ID,
        name="byte-lm",
        spec=parse_spec(SPEC),
        spec_version=1,
        etag="1",
        created_at=NOW,
        updated_at=NOW,
        status=JobStatus(**({"state": JobState.FAILED} | status)),
    )


def test_values_that_are_not_finite_give_an_empty_line() -> None:
    assert draw_sparkline([math.nan, math.inf], 10) == ""


@given(st.lists(st.floats()), st.integers(0, 50))
def test_any_values_fit_into_the_width(values: list[float], width: int) -> None:
    assert len(draw_sparkline(values, width)) <= width


def test_missing_workers_are_hollow_squares() -> None:
    assert draw_worker_bar(3, 4) == "■■■□ 3/4"
    assert draw_worker_bar(60, 64) == "60/64"


@given(st.lists(st.floats(0, 1e12), max_size=12), st.integers(1, 100))
def test_shares_fill_the_width_and_every_part_is_visible_if_the_width_allows(amounts: list[float], width: int) -> None:
    blocks = split_width(amounts, width)
    assert len(blocks) == len(amounts)
    assert sum(blocks) == (width if sum(amounts) > 0 else 0)
    assert all((block == 0) for block, amount in zip(blocks, amounts, strict=True) if amount == 0)
    if sum(1 for amount in amounts if amount > 0) <= width:
        assert all(block >= 1 for block, amount in zip(blocks, amounts, strict=True) if amount > 0)


MODEL = {"dim": 64, "num_layers": 4, "num_heads": 4, "seq_len": 32}
FROZEN = {"groups": [{"match": "blocks.*", "frozen": True}]}


@pytest.mark.parametrize(
    ("optimizer", "expected", "absent"),
    [
        ({}, "0.00023 B parameters, 8 micro-batches", "trained"),
        ({"name": "sgd"}, "0 bytes of optimizer state for each", "trained"),
        ({"name": "lion", "ema_decay": 0.99, **FROZEN}, "M of them trained, 8 micro-batches", "bytes of optimizer"),
        ({"name": "muon"}, "bytes of optimizer state for each", "trained"),
    ],
)
def test_the_head_says_what_is_trained_and_what_the_optimizer_keeps(
    optimizer: dict[str, Any], expected: str, absent: str
) -> None:
    spec = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "model": MODEL, "optimizer": optimizer}
    head = render_plan(answer(PlanRequest(spec=spec, workers=2), PROFILES))[0]
    assert isinstance(head, Text)
    assert expected in head.plain
    assert absent not in head.plain


def test_a_layout_that_the_engine_refuses_is_compared_with_the_reason() -> None:
    model = {**MODEL, "num_heads": 4, "num_kv_heads": 2}
    spec = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "model": model}
    lines = render_plan(answer(PlanRequest(spec=spec, workers=4, compare="tp4"), PROFILES))
    refused = [line.plain for line in lines if isinstance(line, Text) and "refuses" in line.plain]
    assert len(refused) == 1
    assert refused[0].startswith("the engine refuses it: tp 4 does not divide the number of key and value heads, 2: ")
