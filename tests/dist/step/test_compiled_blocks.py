"""Blocks are compiled once on a node: neither a group that re-forms nor a new worker compiles them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.messages import ExitKind

STEPS = 10
SPEC: dict[str, Any] = {
    **snapshot_spec(STEPS),
    "task": "compiled_tasks:Compiled",
    "model": {"dropout": 0.0},
    "plan": {"blocks": "blocks", "num_blocks": 2},
}


@pytest.mark.matrix  # the compiler takes half a minute on a cold start
def test_nothing_is_compiled_again_when_groups_re_form_and_a_worker_joins(
    make_job: Any, reference: Any, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    def noted(worker: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((notes / f"{worker.pid}.json").read_text(encoding="utf-8"))
        return found

    spec = {**SPEC, "data": {"notes": str(notes)}, "compile": True}
    job = make_job(memory=True, **spec)
    survivor, victim, newcomer = job.workers(3)
    for worker in (survivor, victim):
        worker.strike("backward", 3, "hold")
    generation = job.start([survivor, victim])
    for worker in (survivor, victim):
        worker.reached()
    victim.kill()
    survivor.call("interrupt", generation)
    survivor.call("go")
    first = noted(survivor)
    assert first["graphs"] == 1, "equal blocks share one compilation"

    group = [survivor, newcomer]
    source = job.in_memory(job.interrupt([survivor]), group)
    newcomer.strike("backward", 6, "kill")
    job.start(group, restore_snapshot=source)
    assert newcomer.died()
    assert noted(survivor) == first, "the layout is the same"
    assert (noted(newcomer)["graphs"], noted(newcomer)["misses"]) == (1, 0), "it has read the code of the others"

    source = job.in_memory(job.interrupt([survivor]), [survivor])
    assert [one.kind for one in job.run([survivor], restore_snapshot=source)] == [ExitKind.FINISHED]
    assert noted(survivor) == first, "the layout is another one"
    assert job.losses([survivor]) == pytest.approx(reference(STEPS, **{**SPEC, "task": "cast_tasks:Untied"}), abs=1e-6)
    assert list(Path(first["directory"]).iterdir())
