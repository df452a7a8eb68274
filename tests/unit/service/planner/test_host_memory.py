"""Host memory of a worker: snapshots, copies for the buddy, and a whole model that each worker builds."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_service.planner import memory_note, plan, rank, refusal
from shoal_service.planner.host_memory import LOG_ENTRIES, host_need
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.snapshot_store.log.entry_slots import MAX_ENTRIES, STEPS_PER_COPY

MIB = 1 << 20
MODEL = {"dim": 1024, "num_layers": 8, "num_heads": 8, "seq_len": 64}
"""101 M parameters."""
BATCH = {"global_size": 8, "micro_size": 1}


def test_on_a_cpu_the_state_is_there_twice_and_a_buddy_has_two_copies_and_the_log(job: Any) -> None:
    need = host_need(job(), MIB, 100 * MIB)
    assert (need.process, need.training, need.snapshots) == (300 * MIB, 100 * MIB, 12 * MIB)
    assert (need.sent, need.kept, need.log) == (36 * MIB, 24 * MIB, 24 * 4 * MIB)
    assert need.alone == 412 * MIB


def test_what_is_switched_off_needs_nothing(job: Any) -> None:
    without_log = host_need(job(snapshot={"gradient_log": "off"}), MIB, 0)
    assert without_log.log == 0 and without_log.kept == 24 * MIB
    nothing = host_need(job(snapshot={"enabled": False}), MIB, 0)
    assert (nothing.snapshots, nothing.sent, nothing.kept, nothing.log) == (0, 0, 0, 0)


def test_a_gpu_and_a_fused_update_have_two_copies_in_the_host(job: Any) -> None:
    for sections in ({"worker": {"gpus": 1}}, {"optimizer": {"fused": True}}):
        assert host_need(job(**sections), MIB, 0).snapshots == 24 * MIB
    assert host_need(job(worker={"gpus": 1}), MIB, 0).log == 0
    assert host_need(job(reduce_precision="bf16"), MIB, 0).log == 24 * 2 * MIB


def test_the_log_has_the_entries_of_the_store() -> None:
    assert STEPS_PER_COPY < LOG_ENTRIES <= MAX_ENTRIES


def test_a_task_that_builds_its_model_in_each_worker_needs_all_of_it(job: Any) -> None:
    sections: dict[str, Any] = {"task": "mine:Task", "data": {}, "elasticity": {"max_workers": 4}}
    whole = plan(job(**sections, plan={"num_params": 256 * MIB}), 4).host
    assert (whole.build, whole.training, whole.snapshots) == (1024 * MIB, 1024 * MIB, 768 * MIB)
    many = plan(job(**sections | {"elasticity": {"max_workers": 8}}, plan={"num_params": 256 * MIB}), 8).host
    assert many.build == 1024 * MIB and many.alone == (300 + 1024) * MIB, "more than its eighth of the state"
    parts = plan(job(**sections, plan={"num_params": 256 * MIB, "deferred_init": True}), 4).host
    assert parts.build == 0
    assert plan(job(**sections), 4).host.alone == 0, "its size is not known"


def test_snapshots_are_a_part_of_the_memory_that_a_layout_needs(job: Any) -> None:
    sizes = {
        enabled: rank(job(MODEL, batch=BATCH, snapshot={"enabled": enabled}), 4, top=1).predictions[0]
        for enabled in (True, False)
    }
    assert sizes[True].bytes["snapshots"] == pytest.approx(12 * 101e6 / 4, rel=0.02)
    assert sizes[True].memory_bytes - sizes[True].bytes["snapshots"] == sizes[False].memory_bytes


def test_a_job_that_only_its_snapshots_make_too_large_is_refused_with_that_way_out(job: Any) -> None:
    spec = job(MODEL, batch=BATCH, worker={"memory_gib": 1.2}, elasticity={"max_workers": 4})
    words = refusal(spec)
    assert "snapshots" in words and "snapshot.enabled: false (" in words
    assert refusal(job(MODEL, batch=BATCH, worker={"memory_gib": 2}, elasticity={"max_workers": 4})) == ""


def test_a_task_whose_whole_model_exceeds_the_workers_memory_is_refused() -> None:
    document: dict[str, Any] = {
        "task": "mine:Task",
        "stop": {"steps": 1},
        "plan": {"num_params": 10**9},
        "worker": {"memory_gib": 3},
        "batch": BATCH,
        "elasticity": {"max_workers": 8},
    }
    words = refusal(parse_spec(document))
    assert "worker.memory_gib is 3" in words and "3.7 GiB" in words and "deferred_init" in words
    assert refusal(parse_spec({**document, "worker": {"memory_gib": 5}})) == ""
    in_parts = {"num_params": 10**9, "deferred_init": True}
    assert refusal(parse_spec({**document, "plan": in_parts, "worker": {"memory_gib": 3.7}})) == ""


def test_at_submit_a_node_that_is_too_small_for_the_workers_on_it_is_noted(job: Any) -> None:
    spec = job(MODEL, batch=BATCH, elasticity={"max_workers": 4})
    need = plan(spec, 4).host
    two, three, four = (need.of(number) / (1 << 30) for number in (2, 3, 4))
    assert memory_note(spec, [(4.0, 0.0, four + 0.1)], None) == ""
    assert memory_note(spec, [(2.0, 0.0, two + 0.1), (2.0, 0.0, two + 0.1)], None) == ""
    words = memory_note(spec, [(2.0, 0.0, two + 0.1), (3.0, 0.0, two + 0.1)], None)
    assert words.startswith(f"The prediction for 3 workers on one node is {three:,.1f} GiB (process 0.3 + 3 x ")
    assert memory_note(job(task="mine:Task", data={}, elasticity={"max_workers": 4}), [(4.0, 0.0, 0.1)], None) == ""
