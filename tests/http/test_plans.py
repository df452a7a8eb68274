"""POST /v1/plans, and models that are refused at submit because no cluster could hold them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.views import series_point
from shoal_api.client import ApiError
from shoal_service.control.planning import PlanAnswer, PlanningProcesses, PlanRequest, answer
from shoal_service.planner.gpus import PROFILES
from shoal_workers.contract.checks.spec_errors import SpecError

SPEC: dict[str, Any] = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}}


def test_the_client_gets_the_table_and_the_choice(service: Any) -> None:
    found = service.client.plan(SPEC, workers=4, top=3)
    assert (found.name, found.num_micro_batches, found.tokens_per_step) == ("job", 8, 32 * 256)
    assert (found.choice.name, found.choice.num_idle) == ("dp4", 0)
    assert len(found.ranking.predictions) == 3
    assert found.ranking.profile == "cpu"
    assert found.ranking.predictions[0].reasons[0] == "8 micro-batches over 4 ranks: 2 each"


def test_a_plan_for_given_gpus_ignores_the_workers_of_the_spec(service: Any) -> None:
    found = service.client.plan({**SPEC, "elasticity": {"max_workers": 2}}, gpus=8, gpu="b200", top=1)
    assert (found.ranking.profile, found.ranking.world_size) == ("b200", 8)


def test_the_client_gives_the_nodes_of_each_rack(service: Any) -> None:
    spec = {**SPEC, "parallelism": {"tp": 2}}
    found = service.client.plan(spec, workers=4, racks=[[2], [1, 1]])
    assert found.ranking.predictions[0].links == {"tp": "between_nodes", "dp_shard": "between_racks"}


def test_a_plan_is_corrected_by_the_steps_of_jobs_on_this_hardware(
    service: Any, spec: Any, supervise: Callable[..., str]
) -> None:
    question = {"spec": {**SPEC, "model": {"dim": 96}}, "workers": 2}
    before = PlanAnswer.model_validate(service.http.post("/v1/plans", json=question).json()).ranking
    supervise(series=tuple(series_point(step, step_s=1e4) for step in range(1, 40)))
    after = PlanAnswer.model_validate(service.http.post("/v1/plans", json=question).json()).ranking
    assert before.correction is not None and after.correction is not None
    assert after.correction.num_jobs == before.correction.num_jobs + 1
    assert after.predictions[0].step_s > 2 * before.predictions[0].step_s


def test_idle_ranks_are_reported(service: Any) -> None:
    found = service.client.plan({**SPEC, "model": {"dropout": 0.1}}, workers=11)
    assert (found.choice.layout.world_size, found.choice.num_idle) == (8, 3)
    assert "no legal layout of 11 ranks" in found.ranking.note


def test_a_task_of_the_users_has_a_choice_and_no_table(service: Any) -> None:
    found = service.client.plan({"stop": {"steps": 1}, "task": "mine:Task"}, workers=3)
    assert (found.choice.name, found.ranking.predictions, found.tokens_per_step) == ("dp3", (), 0)
    assert "plain: every worker has the whole state" in found.choice.reason


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "exactly one of workers and gpus"),
        ({"workers": 1, "gpus": 1}, "exactly one of workers and gpus"),
        ({"workers": 1, "gpu": "h100"}, "needs gpus"),
        ({"gpus": 1, "gpu": "abacus"}, "gpu 'abacus' has no profile; there are: a100-40gb,"),
        ({"workers": 3, "spec": {**SPEC, "parallelism": {"tp": 2}}}, "needs a multiple of tp 2 = 2 workers"),
        ({"workers": 1, "spec": {**SPEC, "seeed": 1}}, "unknown key 'seeed'"),
        ({"workers": 5, "racks": [[2, 1], [1]]}, "racks have room for 4 workers, of 5"),
        (
            {"workers": 2, "spec": {"script": {"file": "train.py"}}},
            "train.py is a script, which splits its own work: every worker runs it",
        ),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(service: Any, change: dict[str, Any], expected: str) -> None:
    answer = service.http.post("/v1/plans", json={"spec": SPEC, **change})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-spec")
    assert expected in answer.text.replace('\\"', '"')


@pytest.mark.parametrize("body", [[], {"spec": 3, "workers": 1}, {"spec": SPEC, "workers": 0}, {"spec": SPEC, "x": 1}])
def test_a_body_of_another_shape_is_refused(service: Any, body: Any) -> None:
    answer = service.http.post("/v1/plans", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")


def test_a_model_that_fits_nowhere_is_refused_at_submit_with_the_arithmetic(service: Any) -> None:
    with pytest.raises(ApiError) as caught:
        service.client.submit({**SPEC, "worker": {"memory_gib": 0.1}})
    [problem] = caught.value.problem.errors
    assert problem.path == "model"
    assert "does not fit on 1 worker of 0.1 GiB" in problem.message


LONG: dict[str, Any] = {"spec": SPEC, "gpus": 65_535}
"""No layout uses so many; the search for the nearest one that has some takes about a minute."""


def test_a_search_that_takes_too_long_is_refused_and_its_process_ends() -> None:
    async def live() -> None:
        planning = PlanningProcesses(PROFILES, budget_s=3.0)
        with pytest.raises(SpecError) as refused:
            await planning.answer(PlanRequest(**LONG))
        (problem,) = refused.value.problems
        assert problem.path == "gpus" and "gpus 65535: the planner has no answer within 3 s" in problem.message
        assert "Ask for fewer" in problem.message and not _planners()

    asyncio.run(live())


def test_a_process_is_kept_for_the_next_question() -> None:
    async def live() -> None:
        planning = PlanningProcesses(PROFILES)
        request = PlanRequest(spec=SPEC, workers=4)
        assert await planning.answer(request) == answer(request, PROFILES)
        kept = _planners()
        with pytest.raises(SpecError, match="exactly one"):
            await planning.answer(PlanRequest(spec=SPEC))
        assert _planners() == kept and len(kept) == 1
        await planning.close()

    asyncio.run(live())


def test_a_search_ends_with_its_request(service: Any) -> None:
    with httpx.Client(base_url=service.url, headers=service.http.headers, trust_env=False) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/plans", json=LONG, timeout=httpx.Timeout(30, read=2))
    assert service.http.get("/v1/jobs").status_code == 200
    while _planners():
        service.http.get("/healthz")


def _planners() -> list[int]:
    """The planning processes of this one that live."""
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children if Path(f"/proc/{pid}").exists()}
    return [pid for pid, line in lines.items() if b"shoal_service.control.planning" in line]
