"""What a trace says: memory over time, and communication that the engine's own clocks do not see. Pure.

A trace is the text of torch's profiler in Chrome's format. It may have hundreds of megabytes, so its events are read
one by one, and are never all in memory as objects.

    "traceEvents": [ {"ph": "X", "name": ..., "ts": us, "dur": us, "cat": "kernel", ...},
                     {"ph": "i", "name": "[memory]", "args": {"Bytes": ..., "Total Allocated": ...}}, ... ]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
_WAITS = frozenset({"_c10d_functional::wait_tensor"})
"""Operations that wait for a collective in native code, where the engine's clock of waiting does not look."""
_COLLECTIVE_KERNELS = ("nccl", "rccl")
_CPU, _PHASE_LANE = 0, "shoal phases"
Window = tuple[float, float]
"""Begin and end, in the microseconds of the trace."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What tensors took on one device, over time."""

    device: str
    is_relative: bool
    """Beyond what they took when the trace began. Otherwise: in all."""
    peak_bytes: int
    points: tuple[tuple[float, int], ...]
    """Seconds since the first profiled step began, and bytes; the highest of its interval."""


@dataclass(slots=True)
class Found:
    """Of one pass over the events."""

    waits: list[Window] = field(default_factory=list)
    collectives: list[Window] = field(default_factory=list)
    """Kernels of collectives."""
    kernels: list[Window] = field(default_factory=list)
    """All other kernels."""
    memory: dict[tuple[int, int], list[tuple[float, int, int]]] = field(default_factory=dict)
    """By device type and number: microseconds, bytes allocated (negative: freed), bytes allocated in all."""


def base_ns(text: str) -> int:
    """Wall-clock time of the trace's zero, nanoseconds since the epoch; 0: its times are absolute."""
    found = _BASE.search(text[:4096]) or _BASE.search(text[-4096:])
    return int(found.group(1)) if found else 0


def events_of(text: str) -> Iterator[dict[str, Any]]:
    """Raises ValueError: this is no trace."""
    begin = _EVENTS.search(text)
    if begin is None:
        raise ValueError("the profiler wrote no list of events")
    decoder, at = json.JSONDecoder(), begin.end()
    while True:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if at >= len(text) or text[at] == "]":
            return
        event, at = decoder.raw_decode(text, at)
        yield event


def with_phases(text: str, phases: Iterable[tuple[str, float, float]]) -> str:
    """The same trace with a lane of the engine's phases. `phases`: name, begin and end in microseconds."""
    begin = _EVENTS.search(text)
    assert begin is not None, "events_of comes first"
    added = [
        {"ph": "X", "cat": "shoal", "name": name, "pid": _PHASE_LANE, "tid": 0, "ts": at, "dur": max(0.0, end - at)}
        for name, at, end in phases
    ]
    rest = text[begin.end() :]
    comma = "," if added and not rest.lstrip().startswith("]") else ""
    return text[: begin.end()] + ",".join(json.dumps(event) for event in added) + comma + rest


def read(events: Iterable[Mapping[str, Any]]) -> Found:
    """What the functions below need, of one pass over all events."""
    found = Found()
    for event in events:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "[memory]":
            device = (int(args.get("Device Type", _CPU)), int(args.get("Device Id", 0)))
            change, total = int(args.get("Bytes", 0)), int(args.get("Total Allocated", 0))
            found.memory.setdefault(device, []).append((float(event["ts"]), change, total))
        elif event.get("ph") == "X" and "dur" in event:
            window = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            if event.get("cat") == "kernel":
                is_collective = any(word in name.lower() for word in _COLLECTIVE_KERNELS)
                (found.collectives if is_collective else found.kernels).append(window)
            elif name in _WAITS:
                found.waits.append(window)
    return found


def unseen_communication(found: Found, steps: Sequence[Window]) -> list[float]:
    """Seconds of exposed communication in each step that the engine's clock has not counted: on a GPU those in which
    only kernels of collectives run, elsewhere those of waits in native code."""
    if found.collectives or found.kernels:
        exposed = _without(_union(found.collectives), _union(found.kernels))
    else:
        exposed = _union(found.waits)
    return [sum(_overlap(one, step) for one in exposed) / 1e6 for step in steps]


def memory_of(found: Found, began_us: float, *, max_points: int) -> list[Memory]:
    """The timeline of each device, GPUs first; at most `max_points` points each."""
    made = []
    for (kind, number), changes in sorted(found.memory.items(), reverse=True):
        changes = sorted(changes)
        is_relative = kind == _CPU
        levels, level = [], 0
        for at, change, total in changes:
            level = level + change if is_relative else total
            levels.append(((at - began_us) / 1e6, level))
        made.append(
            Memory(
                device="cpu" if is_relative else f"gpu {number}",
                is_relative=is_relative,
                peak_bytes=max(bytes_ for _, bytes_ in levels),
                points=tuple(_highest(levels, max_points)),
            )
        )
    return made


def _highest(levels: Sequence[tuple[float, int]], max_points: int) -> list[tuple[float, int]]:
    """The highest of each of `max_points` runs of equally many levels."""
    size = -(-len(levels) // max_points)
    return [max(levels[at : at + size], key=lambda one: one[1]) for at in range(0, len(levels), size)]


def _union(windows: Iterable[Window]) -> list[Window]:
    merged: list[Window] = []
    for begin, end in sorted(windows):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _without(windows: Sequence[Window], others: Sequence[Window]) -> list[Window]:
    """The parts of `windows` in which none of `others` is; both are unions."""
    left: list[Window] = []
    first = 0
    for begin, end in windows:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at, index = begin, first
        while index < len(others) and others[index][0] < end:
            if others[index][0] > at:
                left.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def _overlap(one: Window, other: Window) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
