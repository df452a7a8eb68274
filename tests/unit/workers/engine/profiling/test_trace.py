"""What a trace says: memory over time, exposed communication; and its text with the engine's phases in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal_workers.contract.profiles import OF_AXIS, WAITING, Category, StepTimes
from shoal_workers.engine.profiling.digest import (
    Found,
    base_ns,
    events_of,
    memory_of,
    overlaps,
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


def _collective(group: str, at: float, long: float) -> list[dict[str, Any]]:
    """An all-reduce of gloo, which begins 1 microsecond after its call."""
    called = _ran(f"{OF_AXIS}{group} all-reduce", at - 1, 0.5, "user_annotation")
    return [called, _ran("gloo:all_reduce", at, long, "user_annotation")]


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
    assert [(event["name"], event["ts"], event["dur"]) for event in added] == [
        ("forward", 1.0, 3.0),
        ("backward", 4.0, 5.0),
    ]
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


def test_what_computing_hides_of_the_collectives_of_each_axis_on_a_cpu() -> None:
    found = _found(
        *_collective("mesh_shards", 100.0, 100.0),
        *_collective("undefined", 300.0, 10.0),
        *_collective("mesh_shards", 400.0, 100.0),
        _ran(WAITING, 150.0, 52.0, "user_annotation"),  # half of the first
        _ran(WAITING, 300.0, 11.0, "user_annotation"),
        _ran(WAITING, 399.0, 102.0, "user_annotation"),
    )
    assert [(overlap.axis, overlap.seconds, overlap.hidden) for overlap in overlaps(found)] == [
        ("shards", pytest.approx(200e-6), pytest.approx(0.25)),
        ("all ranks", pytest.approx(10e-6), 0.0),
    ]


def test_each_window_of_gloo_belongs_to_the_group_of_its_call() -> None:
    """A reduce-scatter runs as an all-reduce, and a receive has another name."""
    scattered = _ran(f"{OF_AXIS}mesh_shards reduce-scatter", 99.0, 0.5, "user_annotation")
    received = _ran(f"{OF_AXIS}mesh_pp receive", 499.0, 0.5, "user_annotation")
    found = _found(
        *(scattered, _ran("gloo:all_reduce", 100.0, 30.0, "user_annotation")),
        *_collective("mesh_dp_replicate", 200.0, 20.0),
        *(received, _ran("gloo:recv", 500.0, 10.0, "user_annotation")),
    )
    assert [(overlap.axis, overlap.seconds) for overlap in overlaps(found)] == [
        ("shards", pytest.approx(30e-6)),
        ("dp_replicate", pytest.approx(20e-6)),
        ("pp", pytest.approx(10e-6)),
    ]


def test_what_kernels_hide_of_the_collectives_of_each_axis_on_a_gpu() -> None:
    def ran(group: str, at: float, long: float) -> dict[str, Any]:
        event = _ran("ncclDevKernel_ReduceScatter", at, long, "kernel")
        return event | {"args": {"Process Group Description": group}}

    host = _ran(WAITING, 400.0, 1.0, "user_annotation")  # `Work.wait` only orders the streams
    found = _found(
        ran("mesh_shards", 0.0, 100.0), ran("mesh_tp", 200.0, 50.0), _ran("gemm", 20.0, 80.0, "kernel"), host
    )
    assert [(overlap.axis, overlap.seconds, overlap.hidden) for overlap in overlaps(found)] == [
        ("shards", pytest.approx(100e-6), pytest.approx(0.8)),
        ("tp", pytest.approx(50e-6), 0.0),
    ]


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
