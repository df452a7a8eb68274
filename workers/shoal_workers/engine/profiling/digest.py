"""`python -m shoal_workers.engine.profiling.digest DIRECTORY`: makes the files of a profile of a raw trace.

    raw.json     in    the trace as torch wrote it
    marks.json   in    Marks: steps and phases of the engine, the wanted names, the size limit
    *.json.gz    out   the trace with the engine's phases; the memory timeline
    stdout       out   Digest: sizes, the peak, communication that only the trace shows

A process of its own at the lowest priority, since the training thread would wait for the interpreter's lock otherwise.
Imports no torch.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.profiling.messages import ProfileFile
from shoal_workers.engine.profiling import trace

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
    """Of each step: see trace.unseen_communication."""
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
    base = trace.base_ns(text)
    steps = [((mark.begin_ns - base) / 1e3, (mark.end_ns - base) / 1e3) for mark in marks.steps]
    found = trace.read(trace.events_of(text))
    memory = trace.memory_of(found, steps[0][0], max_points=_MAX_POINTS)
    phases = [(mark.name, (mark.begin_ns - base) / 1e3, (mark.end_ns - base) / 1e3) for mark in marks.phases]
    named = [
        {"step": int(mark.name), "at_s": (at - steps[0][0]) / 1e6, "s": (end - at) / 1e6}
        for mark, (at, end) in zip(marks.steps, steps, strict=True)
    ]
    timeline = {"steps": named, "devices": [asdict(one) for one in memory]}
    wanted = {
        marks.trace_name: trace.with_phases(text, phases),
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
        unseen_s=tuple(trace.unseen_communication(found, steps)),
        peak_bytes=memory[0].peak_bytes if memory else None,
        note="; ".join(notes),
    )


def _write(path: Path, content: str) -> int:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as out:
        out.write(content)
    return path.stat().st_size


if __name__ == "__main__":
    os.nice(19)
    sys.stdout.write(digest(Path(sys.argv[1])).model_dump_json())
