"""A mixture of sources over a lost worker and a change of size: the losses of one process in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.model import LM_TASK
from shoal_workers.contract.worker_reports import GroupFormed

STEPS = 8


def _spec(directory: Path) -> dict[str, Any]:
    (directory / "web.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(200)))
    chats = [{"message": {"content": f"what is {n} times {n}? it is {n * n}."}} for n in range(100)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    sources = [
        {"path": str(directory / "web.txt"), "weight": 0.7},
        {"path": str(directory / "chats.jsonl"), "weight": 0.3, "field": "message.content"},
    ]
    return {
        "task": LM_TASK,
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
        "data": {"sources": sources, "cache_dir": str(directory / "cache"), "validation_fraction": 0},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 0.02},
        "schedule": {"warmup_steps": 2},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 3},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": 4},
        "seed": 3,
    }


def test_a_kill_and_a_change_of_size_leave_the_order_as_it_is(make_job: Any, reference: Any, tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    job = make_job(**spec)
    workers = job.workers(3)
    workers[0].strike("forward", 4, "hold")
    job.start(workers)
    workers[0].reached()
    job.wait_until_committed(workers, 3)
    workers[1].strike("backward", 5, "kill")
    workers[0].call("go")
    assert workers[1].died()
    survivors = [workers[0], workers[2]]
    job.interrupt(survivors)
    grown = survivors + job.workers(2)
    assert [end.kind for end in job.run(grown)] == [ExitKind.FINISHED] * 4
    assert job.losses(grown) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
    assert job.reported(grown, GroupFormed)[-1].start_step == 3
