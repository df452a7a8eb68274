"""`python -m shoal_workers.engine.profiling.digest DIRECTORY`: makes the files of a profile of a raw trace.

    raw.json     in    the trace as torch wrote it
    marks.json   in    Marks: steps and phases of the engine, the wanted names, the size limit
    *.json.gz    out   the trace with the engine's phases; the memory timeline
    stdout       out   Digest: sizes, the peak, communication that only the trace shows

Hidden here: what a trace says. It is the text of torch's profiler in Chrome's format, and may have hundreds of
megabytes, so its events are read one by one and are never all in memory as objects.

    "traceEvents": [ {"ph": "X", "name": ..., "ts": us, "dur": us, "cat": "kernel", ...},
                     {"ph": "i", "name": "[memory]", "args": {"Bytes": ..., "Total Allocated": ...}}, ... ]

A process of its own at the lowest priority, since the training thread would wait for the interpreter's lock otherwise.
Imports no torch. Started by `Profiling`, on its writer thread.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.profiles import OF_AXIS, WAITING, Overlap, ProfileFile

RAW, MARKS = "raw.json", "marks.json"
_MAX_RAW_BYTES = 512 << 20
_MAX_POINTS = 2_000
_MIB = 1 << 20


class Mark(Frozen):
    name: str
    begin_ns: int
    """Wall-clock, nanoseconds since the epoch."""
    end_ns: int


class Marks(Frozen):
    steps: tuple[Mark, ...]
    phases: tuple[Mark, ...]
    trace_name: str
    memory_name: str
    max_file_bytes: int


class Digest(Frozen):
    files: tuple[ProfileFile, ...]
    unseen_s: tuple[float, ...]
    """Seconds of unseen communication in each step, see `unseen_communication`."""
    overlaps: tuple[Overlap, ...] = ()
    peak_bytes: int | None
    note: str
    """Why a file is missing."""


def digest(directory: Path) -> Digest:
    """Writes the files into the directory. Raises ValueError: the raw trace cannot be read."""
    marks = Marks.model_validate_json((directory / MARKS).read_bytes())
    raw = directory / RAW
    if raw.stat().st_size > _MAX_RAW_BYTES:
        size = raw.stat().st_size / _MIB
        note = f"no trace: {size:,.0f} MiB are more than the limit of {_MAX_RAW_BYTES / _MIB:,.0f}; take fewer steps"
        return Digest(files=(), unseen_s=tuple(0.0 for _ in marks.steps), peak_bytes=None, note=note)
    text = raw.read_text(encoding="utf-8")
    base = base_ns(text)
    steps = [((mark.begin_ns - base) / 1e3, (mark.end_ns - base) / 1e3) for mark in marks.steps]
    events = read_events(events_of(text))
    memory = memory_of(events, steps[0][0], max_points=_MAX_POINTS)
    phases = [(mark.name, (mark.begin_ns - base) / 1e3, (mark.end_ns - base) / 1e3) for mark in marks.phases]
    named = [
        {"step": int(mark.name), "at_s": (at - steps[0][0]) / 1e6, "s": (end - at) / 1e6}
        for mark, (at, end) in zip(marks.steps, steps, strict=True)
    ]
    timeline = {"steps": named, "devices": [asdict(sample) for sample in memory]}
    wanted = {
        marks.trace_name: with_phases(text, phases),
        marks.memory_name: json.dumps(timeline, separators=(",", ":")),
    }
    files, notes = [], []
    for name, content in wanted.items():
        size = _write(directory / name, content)
        if size > marks.max_file_bytes:
            (directory / name).unlink()
            notes.append(f"{name}: {size / _MIB:,.1f} MiB are more than {marks.max_file_bytes / _MIB:,.1f}, not kept")
        else:
            files.append(ProfileFile(name=name, bytes=size))
    return Digest(
        files=tuple(files),
        unseen_s=tuple(unseen_communication(events, steps)),
        overlaps=tuple(overlaps(events)),
        peak_bytes=memory[0].peak_bytes if memory else None,
        note="; ".join(notes),
    )


def _write(path: Path, content: str) -> int:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as out:
        out.write(content)
    return path.stat().st_size


_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
_WAITS = frozenset({"_c10d_functional::wait_tensor"})
"""Operations that wait for a collective in native code, where the engine's clock of waiting does not look."""
_COLLECTIVE_KERNELS = ("nccl", "rccl")
_GLOO = "gloo:"
_OF_GLOO = {"recv": "receive"}
"""gloo's names of collectives that have another one in `OF_AXIS`."""
_ALL_RANKS = "all ranks"
_CPU, _PHASE_LANE = 0, "shoal phases"
Window = tuple[float, float]
"""Begin and end, in the microseconds of the trace."""
_ALWAYS: Window = (-math.inf, math.inf)


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
    """What one pass over the events has found."""

    waits: list[Window] = field(default_factory=list)
    collectives: list[Window] = field(default_factory=list)
    """Kernels of collectives."""
    by_axis: dict[str, list[Window]] = field(default_factory=dict)
    """The same by the description of their group."""
    called: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """On a CPU, by the name of the collective: begin and group of each call."""
    ran: dict[str, list[Window]] = field(default_factory=dict)
    """On a CPU, by the name of the collective: when gloo was at it."""
    waited: list[Window] = field(default_factory=list)
    """On a CPU: when the training thread waited for a collective."""
    kernels: list[Window] = field(default_factory=list)
    """All other kernels."""
    memory: dict[tuple[int, int], list[tuple[float, int, int]]] = field(default_factory=dict)
    """Events by device type and number: microseconds, bytes allocated (negative: freed), bytes allocated in all."""


def base_ns(text: str) -> int:
    """Wall-clock time of the trace's zero, nanoseconds since the epoch; 0: its times are absolute."""
    match = _BASE.search(text[:4096]) or _BASE.search(text[-4096:])
    return int(match.group(1)) if match else 0


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
    """Returns the same trace with a lane of the engine's phases. `phases`: name, begin and end in microseconds."""
    begin = _EVENTS.search(text)
    assert begin is not None, "events_of comes first"
    added = [
        {"ph": "X", "cat": "shoal", "name": name, "pid": _PHASE_LANE, "tid": 0, "ts": at, "dur": max(0.0, end - at)}
        for name, at, end in phases
    ]
    rest = text[begin.end() :]
    comma = "," if added and not rest.lstrip().startswith("]") else ""
    return text[: begin.end()] + ",".join(json.dumps(event) for event in added) + comma + rest


def read_events(events: Iterable[Mapping[str, Any]]) -> Found:
    trace = Found()
    for event in events:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "[memory]":
            device = (int(args.get("Device Type", _CPU)), int(args.get("Device Id", 0)))
            change, total = int(args.get("Bytes", 0)), int(args.get("Total Allocated", 0))
            trace.memory.setdefault(device, []).append((float(event["ts"]), change, total))
        elif event.get("ph") == "X" and "dur" in event:
            window = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            if event.get("cat") == "kernel":
                is_collective = any(word in name.lower() for word in _COLLECTIVE_KERNELS)
                (trace.collectives if is_collective else trace.kernels).append(window)
                if is_collective:
                    trace.by_axis.setdefault(args.get("Process Group Description", ""), []).append(window)
            elif name.startswith(OF_AXIS):
                group, _, collective = name.removeprefix(OF_AXIS).partition(" ")
                trace.called.setdefault(collective, []).append((window[0], group))
            elif name == WAITING:
                trace.waited.append(window)
            elif name.startswith(_GLOO):
                collective = name.removeprefix(_GLOO).replace("_", "-")
                trace.ran.setdefault(_OF_GLOO.get(collective, collective), []).append(window)
            elif name in _WAITS:
                trace.waits.append(window)
    return trace


def overlaps(events: Found) -> list[Overlap]:
    """Return, the longest first, each axis's seconds of collectives, and the share of them in which the rank computed:
    on a GPU in another kernel, on a CPU while it did not wait.

    gloo begins collectives of one name in the order of their calls, which have the name of the group. A reduce-scatter
    of gloo is an all-reduce."""
    by_axis = dict(events.by_axis)
    for collective, windows in events.ran.items():
        names = [collective] + ["reduce-scatter"] * (collective == "all-reduce")
        calls = sorted(call for name in names for call in events.called.get(name, []))
        for window, (_, group) in zip(sorted(windows), calls, strict=False):
            by_axis.setdefault(group, []).append(window)
    described = []
    for group, windows in by_axis.items():
        total_us = _length(_union(windows))
        if group in events.by_axis:  # the host waits only to order the streams
            hidden_us = total_us - _length_beyond(windows, events.kernels)
        else:
            hidden_us = _length_beyond(windows, events.waited) if events.waited else 0.0
        axis = _ALL_RANKS if group in ("", "undefined", "default_pg") else group.removeprefix("mesh_")
        if total_us:
            described.append(Overlap(axis=axis, seconds=total_us / 1e6, hidden=hidden_us / total_us))
    return sorted(described, key=lambda overlap: -overlap.seconds)


def unseen_communication(events: Found, steps: Sequence[Window]) -> list[float]:
    """Seconds of exposed communication in each step that the engine's clock has not counted: on a GPU those in which
    only kernels of collectives run, elsewhere those of waits in native code."""
    communicating = events.collectives if events.collectives or events.kernels else events.waits
    return [_length_beyond(communicating, events.kernels, step) / 1e6 for step in steps]


def memory_of(events: Found, began_us: float, *, max_points: int) -> list[Memory]:
    """The timeline of each device, GPUs first; at most `max_points` points each."""
    made = []
    for (kind, number), changes in sorted(events.memory.items(), reverse=True):
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
    return [max(levels[at : at + size], key=lambda pair: pair[1]) for at in range(0, len(levels), size)]


def _union(windows: Iterable[Window]) -> list[Window]:
    merged: list[Window] = []
    for begin, end in sorted(windows):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length_beyond(windows: Sequence[Window], others: Sequence[Window], within: Window = _ALWAYS) -> float:
    """How long one of `windows` is, and none of `others`."""
    return max(0.0, _length(_union([*windows, *others]), within) - _length(_union(others), within))


def _length(windows: Iterable[Window], within: Window = _ALWAYS) -> float:
    """`windows`: a union."""
    return sum(max(0.0, min(end, within[1]) - max(begin, within[0])) for begin, end in windows)


if __name__ == "__main__":
    os.nice(19)
    sys.stdout.write(digest(Path(sys.argv[1])).model_dump_json())
