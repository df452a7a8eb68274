"""What a trace says: memory over time, exposed communication; and its text with the engine's phases in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal_workers.contract.profiles import Category, StepTimes
from shoal_workers.engine.profiling.digest import (
    Found,
    base_ns,
    events_of,
    memory_of,
    read_events,
    unseen_communication,
    with_phases,
)
from shoal_workers.engine.profiling.profiling import corrected

BASE_NS = 1_700_000_000_000_000_000


def _text(*events: dict[str, Any]) -> str:
    """In the form that torch writes, with white space between the events."""
    lines = ",\n  ".join(json.dumps(event, indent=1) for event in events)
    return f'{{"schemaVersion": 1, "baseTimeNanoseconds": {BASE_NS},\n "traceEvents": [\n  {lines}\n]}}\n'


def _ran(name: str, at: float, long: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": long, "args": {}}


def _memory(at: float, change: int, total: int, kind: int = 0) -> dict[str, Any]:
    args = {"Bytes": change, "Total Allocated": total, "Device Type": kind, "Device Id": 0, "Addr": 1}
    return {"ph": "i", "name": "[memory]", "ts": at, "args": args}


def _found(*events: dict[str, Any]) -> Found:
    return read_events(events_of(_text(*events)))


def test_the_events_of_a_text_are_read_one_by_one() -> None:
    events = [_ran("a", 1.0, 2.0), {"ph": "M", "name": 'with "[" and "]"'}]
    assert list(events_of(_text(*events))) == events
    assert list(events_of(_text())) == []
    assert base_ns(_text()) == BASE_NS and base_ns('{"traceEvents": []}') == 0
    with pytest.raises(ValueError, match="no list of events"):
        list(events_of("{}"))


@pytest.mark.parametrize("events", [[], [_ran("a", 1.0, 2.0)]])
def test_the_phases_become_a_lane_of_the_trace(events: list[dict[str, Any]]) -> None:
    made = json.loads(with_phases(_text(*events), [("forward", 1.0, 4.0), ("backward", 4.0, 9.0)]))
    added = [event for event in made["traceEvents"] if event.get("cat") == "shoal"]
    assert [(one["name"], one["ts"], one["dur"]) for one in added] == [("forward", 1.0, 3.0), ("backward", 4.0, 5.0)]
    assert [event for event in made["traceEvents"] if event not in added] == events
    assert json.loads(with_phases(_text(*events), [])) == json.loads(_text(*events))


def test_waits_in_native_code_are_communication_of_the_step_in_which_they_are() -> None:
    found = _found(
        _ran("_c10d_functional::wait_tensor", 100.0, 50.0),
        _ran("aten::mm", 100.0, 500.0),
        _ran("_c10d_functional::wait_tensor", 110.0, 20.0),  # inside of the first one
        _ran("_c10d_functional::wait_tensor", 980.0, 40.0),  # across the boundary
    )
    seconds = unseen_communication(found, [(0.0, 1000.0), (1000.0, 2000.0)])
    assert seconds == pytest.approx([70e-6, 20e-6])


def test_on_a_gpu_only_the_part_of_a_collective_that_no_other_kernel_hides_counts() -> None:
    found = _found(
        _ran("ncclDevKernel_AllGather", 0.0, 100.0, "kernel"),
        _ran("gemm", 20.0, 30.0, "kernel"),
        _ran("gemm", 40.0, 20.0, "kernel"),
        _ran("ncclDevKernel_ReduceScatter", 200.0, 10.0, "kernel"),
        _ran("gemm", 190.0, 50.0, "kernel"),
        _ran("_c10d_functional::wait_tensor", 300.0, 90.0),  # the host only orders the streams
    )
    assert unseen_communication(found, [(0.0, 1000.0)]) == pytest.approx([60e-6])


def test_memory_of_a_cpu_is_counted_from_the_beginning_and_that_of_a_gpu_in_all() -> None:
    found = _found(
        _memory(1000.0, 100, 7), _memory(3000.0, -40, 7), _memory(2000.0, 50, 7), _memory(1500.0, 10, 900, kind=1)
    )
    gpu, cpu = memory_of(found, 1000.0, max_points=10)
    assert (gpu.device, gpu.is_relative, gpu.peak_bytes) == ("gpu 0", False, 900)
    assert (cpu.device, cpu.is_relative, cpu.peak_bytes) == ("cpu", True, 150)
    assert cpu.points == ((0.0, 100), (0.001, 150), (0.002, 110))


def test_a_long_timeline_keeps_the_highest_of_each_interval() -> None:
    changes = [_memory(float(at), 1 if at % 2 else -1, 0) for at in range(1, 1001)]
    changes.append(_memory(500.5, 77, 0))
    [cpu] = memory_of(_found(*changes), 0.0, max_points=20)
    assert len(cpu.points) <= 20
    assert max(level for _, level in cpu.points) == cpu.peak_bytes == 78


def test_a_correction_moves_time_of_computing_and_keeps_the_length_of_a_step() -> None:
    times = [
        StepTimes(step=1, seconds={Category.COMPUTE: 1.0, Category.COMMUNICATION: 0.25}),
        StepTimes(step=2, seconds={Category.COMPUTE: 0.1, Category.COMMUNICATION: 0.0}),
    ]
    first, second = corrected(times, [0.5, 0.4])
    assert first.seconds == {Category.COMPUTE: 0.5, Category.COMMUNICATION: 0.75}
    assert second.seconds == {Category.COMPUTE: 0.0, Category.COMMUNICATION: 0.1}
