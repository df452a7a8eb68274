"""One rank's shared memory is full: it says so, the others stop copying for nothing, and training goes on."""

from __future__ import annotations

import resource
from typing import Any

from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotsStopped

_STEPS = 8
_SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1.0},
}
_LESS_THAN_A_SLOT_BYTES = 64 << 10


def test_a_rank_whose_memory_is_full_says_so_and_no_rank_copies_any_longer(make_job: Any) -> None:
    job = make_job(memory=True, **_SPEC)
    workers = [*job.workers(1, "a"), *job.workers(1, "b")]
    workers[1].strike("forward", 0, "hold")
    job.start(workers, buddy_of=lambda rank: workers[1 - rank])
    workers[1].reached()
    limit = (_LESS_THAN_A_SLOT_BYTES, _LESS_THAN_A_SLOT_BYTES)
    resource.prlimit(workers[1].pid, resource.RLIMIT_FSIZE, limit)
    workers[1].call("go")
    exits = [worker.exit() for worker in workers]
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2
    [stopped] = job.reported(workers, SnapshotsStopped)
    assert (stopped.generation, stopped.rank, stopped.only_copies) == (1, 1, False)
    assert "snapshot.enabled" in stopped.message
    assert all(part.rank == 0 for part in exits[0].snapshot_parts), "rank 1 sends nothing"
    assert exits[1].snapshot_parts == ()
