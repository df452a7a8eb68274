"""The loops of examples/gallery: each loses a worker in the middle, and its losses are those of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import fully_sharded, replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

ROOT = Path(__file__).parents[3]
GALLERY = ROOT / "examples" / "gallery"
BY_HAND = {
    f"{name}-in-place": ROOT / "tests" / "kit" / "loops" / f"{name}_by_hand.py" for name in ("trainer", "lightning")
}
"""The same training without the library, for examples in which a library has the loop."""
STEPS = 8
SHARDED = {"fsdp2": {"dp_shard": "auto"}}
"""`parallelism` of the examples whose models are sharded."""
LOOPS = sorted(file.parent.name for file in GALLERY.glob("*/train.py") if "shoal.run(" in file.read_text("utf-8"))


@pytest.mark.cells(1, 3)
@pytest.mark.parametrize("name", LOOPS)
def test_a_killed_worker_costs_at_most_one_step_and_changes_no_loss(make_job: Any, name: str) -> None:
    job = make_job(
        memory=True,
        task=None,
        loop={"file": f"examples/gallery/{name}/train.py", "args": [str(STEPS)]},
        elasticity={"max_workers": plain_loop.MOST_WORKERS},
        snapshot={"budget": 1.0},
        **({"parallelism": SHARDED[name]} if name in SHARDED else {}),
    )
    layout = fully_sharded if name in SHARDED else replicated
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike("backward", 5, "kill")
    job.start(workers, layout=layout(3))
    assert victim.died()
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step >= 4
    ends = job.run(survivors, layout=layout(2), restore_snapshot=source)
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.reported(survivors, GroupFormed)[-1].start_step == source.step

    plain, _ = plain_loop.undisturbed(BY_HAND.get(name, GALLERY / name / "train.py"), str(STEPS))
    assert job.losses(survivors) == pytest.approx(plain, abs=5e-7)
