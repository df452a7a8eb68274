"""Workers map each other's live slots while they train; a change of layout copies every bit from these maps."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from kit.worlds.whole_states import assert_same_bits, whole
from shoal_workers.contract.layout import Layout

_SWITCH = 7
_CHANGES = {
    "batch": {"global_size": 8, "micro_size": 2},
    "stop": {"steps": _SWITCH + 2},
    "checkpoint": {"every_steps": 100},
    "snapshot": {"budget": 1.0},
}


def _yield_once_mapped(job: Any, group: list[Any]) -> list[Any]:
    """The exits after step _SWITCH, in which rank 0 waits until all workers have mapped the others' two slots."""
    group[0].strike("forward", _SWITCH - 1, "hold")
    generation = job.start(group, layout=Layout(dp_shard=len(group)))
    group[0].reached()
    assert all(worker.call("mapped_bytes") > 0 for worker in group)
    group[0].call("request_yield", generation, False)
    group[0].call("go")
    return [worker.exit() for worker in group]


def test_a_change_of_layout_copies_every_bit_from_maps(make_job: Any, plain_run: Any, text: str) -> None:
    spec = spec_of("dense", text, **_CHANGES)
    job = make_job(memory=True, **spec)
    group = job.workers(4)
    for worker in group:
        worker.strike("snapshot", _SWITCH, "dump")
    exits = _yield_once_mapped(job, group)
    before = whole([worker.dumped() for worker in group])
    source = job.in_memory(exits, group)
    for worker in group:
        worker.strike("forward", _SWITCH, "dump")
    job.finish(group, layout=Layout(dp_shard=2, tp=2), restore_snapshot=source, restore_from=None)
    assert_same_bits(before, whole([worker.dumped() for worker in group]))
    assert job.losses(group) == pytest.approx(plain_run(spec).losses, abs=1e-5)
