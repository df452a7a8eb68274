"""The ranked table, and its notes if there is no layout or none fits."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_service.planner import rank, refusal
from shoal_service.planner.gpus import PROFILES
from shoal_workers.contract.checks.spec_errors import parse_spec

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def _example(name: str) -> Any:
    return parse_spec(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))


def test_fitting_layouts_come_first_and_faster_ones_before(job: Any) -> None:
    found = rank(job(elasticity={"max_workers": 8}, worker={"memory_gib": 0.4}), 4, top=50)
    assert 0 < found.num_fitting < found.num_layouts
    fits = [prediction.fits for prediction in found.predictions]
    assert fits == sorted(fits, reverse=True)
    steps = [p.step_s for p in found.predictions if p.fits]
    assert all(later > 0.97 * earlier for earlier, later in itertools.pairwise(steps))


def test_the_parts_add_up(job: Any) -> None:
    for p in rank(job(elasticity={"max_workers": 8}), 8, top=30).predictions:
        assert sum(p.seconds.values()) == pytest.approx(p.step_s)
        assert sum(p.bytes.values()) == pytest.approx(p.memory_bytes, abs=8)
        assert p.tokens_per_s == pytest.approx(32 * 256 / p.step_s)


@pytest.mark.parametrize(("name", "least", "most"), [("llama-70b", 0.35, 0.55), ("moe-671b", 0.2, 0.5)])
def test_large_models_on_1024_h100_have_a_credible_utilisation(name: str, least: float, most: float) -> None:
    best = rank(_example(name), 1024, PROFILES["h100"], top=1).predictions[0]
    assert best.fits
    assert least < best.mfu < most
    assert best.layout.tp <= 8


def test_for_a_model_that_is_too_large_the_report_names_what_would_fit() -> None:
    found = rank(_example("llama-70b"), 16, PROFILES["l40s"])
    assert found.num_fitting == 0
    assert "70.6 B parameters do not fit on 16 GPUs of 48 GiB" in found.note
    assert "64 GPUs" in found.note
    assert "parallelism.offload: true" in found.note


def test_what_is_offloaded_must_fit_into_the_memory_of_the_host() -> None:
    spec = _example("llama-70b")
    little = spec.model_copy(update={"worker": spec.worker.model_copy(update={"memory_gib": 32.0})})
    enough = spec.model_copy(update={"worker": spec.worker.model_copy(update={"memory_gib": 67.0})})
    off = {"snapshot": spec.snapshot.model_copy(update={"enabled": False})}
    with_snapshots = rank(little, 16, PROFILES["l40s"]).note
    assert (
        "worker.memory_gib 165 (16 bytes for each parameter of a worker and 24 of its snapshots are" in with_snapshots
    )
    little, enough = little.model_copy(update=off), enough.model_copy(update=off)
    note = rank(little, 16, PROFILES["l40s"]).note
    assert "parallelism.offload: true with worker.memory_gib 67 (16 bytes for each parameter of a worker are" in note
    assert "worker.memory_gib is 32" in note
    assert "parallelism.offload: true (" in rank(enough, 16, PROFILES["l40s"]).note


def test_smaller_micro_batches_are_a_way_out(job: Any) -> None:
    model = {"seq_len": 4096, "vocab_size": 50_000, "num_layers": 1}
    spec = job(model, batch={"global_size": 64, "micro_size": 64}, worker={"memory_gib": 4})
    assert "batch.micro_size 1" in rank(spec, 1).note


def test_a_world_without_a_layout_names_the_nearest_that_has_one(job: Any) -> None:
    found = rank(job(), 11)
    assert found.num_layouts == 0
    assert "11 ranks have no legal layout" in found.note
    assert "nearest world that has one: 10" in found.note


def test_a_users_task_has_no_prediction(job: Any) -> None:
    found = rank(job(task="mine:Task", data={}), 4)
    assert found.predictions == ()
    assert "does not know the sizes" in found.note


def test_only_what_no_machine_could_hold_is_refused_at_submit(job: Any) -> None:
    assert refusal(job()) == ""
    assert refusal(job(worker={"memory_gib": 2})) == ""
    assert "do not fit on 1 worker of 0.1 GiB" in refusal(job(worker={"memory_gib": 0.1}))
    assert refusal(_example("llama-70b")) == ""
    huge = _example("llama-70b").model_copy(update={"elasticity": job().elasticity})
    assert "What would fit:" in refusal(huge)
