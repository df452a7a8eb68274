"""One line of plain words for each event of a job. Pure; used by `events`, `submit --follow` and the demo.

An event type that is not known here is still shown, with its data: an older command line must not hide what a newer
server has to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal_service.views import EventView

Data = Mapping[str, Any]


def narrate(event: EventView) -> str:
    """What happened, in one line without control characters."""
    describe = _WORDS.get(event.type)
    text = describe(event.data) if describe else f"{event.type} {_pairs(event.data)}"
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


_BAD = (
    "incident.opened", "worker.lost", "node.suspected", "checkpoint.damaged", "checkpoint.failed", "checkpoint.retried",
)  # fmt: skip


def severity(event: EventView) -> str:
    """The colour of the line: "good", "bad", "warn" or "plain"."""
    if event.type == "job.state":
        return {"SUCCEEDED": "good", "FAILED": "bad", "CANCELLED": "warn", "WAITING": "warn", "RECOVERING": "warn"}.get(
            str(event.data.get("to")), "plain"
        )
    if event.type in _BAD:
        return "bad"
    return "good" if event.type in ("incident.closed", "generation.formed") else "plain"


def _state(data: Data) -> str:
    reason = f" ({data['reason']})" if data.get("reason") else ""
    message = f": {data['message']}" if data.get("message") else ""
    return f"job {data.get('from', '?')} -> {data.get('to', '?')}{reason}{message}"


def _formed(data: Data) -> str:
    workers = data.get("workers", "?")
    layout = f" as {data['layout']}" if data.get("layout") else ""
    return (
        f"generation {data.get('generation', '?')}: {workers} workers{layout}, from step {data.get('start_step', '?')}"
    )


def _forming(data: Data) -> str:
    restore = f", from {data['restore']}" if data.get("restore") else ""
    if data.get("source") == "memory":
        restore = f", from memory, step {data.get('step', '?')}"
    return f"forming generation {data.get('generation', '?')} with {data.get('workers', '?')} workers{restore}"


def _straggler(data: Data) -> str:
    own, others = seconds(data.get("compute_s")), seconds(data.get("median_s"))
    return f"{_worker('is slow')(data)}: {own} a step, the others {others}"


def _incident_opened(data: Data) -> str:
    ranks = ", ".join(str(rank) for rank in data.get("ranks") or ())
    where = f" rank {ranks}" if ranks else ""
    message = f": {data['message']}" if data.get("message") else ""
    return f"incident: {data.get('cause', 'unknown cause')}{where}{message}"


def _incident_closed(data: Data) -> str:
    parts = [
        f"{data.get('from_workers', '?')} -> {data.get('to_workers', '?')} workers",
        f"detected in {seconds(data.get('detect_s'))}",
        f"recovered in {seconds(data.get('recovery_s'))}",
        f"{data.get('steps_lost', '?')} steps lost",
        f"state from {data.get('state_source') or '?'}",
    ]
    return f"incident closed: {', '.join(part for part in parts if '?' not in part)}"


def _committed(data: Data) -> str:
    size = f", {size_text(data['bytes'])}" if data.get("bytes") else ""
    took = f" in {seconds(data['seconds'])}" if data.get("seconds") is not None else ""
    return f"checkpoint of step {data.get('step', '?')} committed{took}{size}"


def _validation(data: Data) -> str:
    loss, bits = data.get("loss"), data.get("bits_per_byte")
    words = f"validation after step {data.get('step', '?')}"
    words += f": loss {loss:.4f}" if isinstance(loss, float) else ""
    return words + (f", {bits:.3f} bits per byte" if isinstance(bits, float) else "")


def _worker(verb: str) -> Callable[[Data], str]:
    def describe(data: Data) -> str:
        rank = f" rank {data['rank']}" if data.get("rank") is not None else ""
        pid = f" (pid {data['pid']})" if data.get("pid") else ""
        reason = f": {data['reason']}" if data.get("reason") else ""
        name = str(data.get("worker_id", "")).rpartition("/")[2]
        return f"worker {name}{rank} {verb}{pid}{reason}"

    return describe


_WORDS: dict[str, Callable[[Data], str]] = {
    "job.created": lambda data: f"job created{' as ' + str(data['name']) if data.get('name') else ''}",
    "job.patched": lambda data: f"spec changed to version {data.get('spec_version', '?')}",
    "job.requested": lambda data: f"asked to be {data.get('desired', '?')}",
    "job.granted": lambda data: (
        f"granted {data.get('to', '?')} workers (before: {data.get('from', '?')}) {data.get('reason', '')}"
    ),
    "job.state": _state,
    "generation.forming": _forming,
    "generation.switching": lambda data: f"switching at the next step boundary: {data.get('reason', '?')}",
    "generation.formed": _formed,
    "incident.opened": _incident_opened,
    "memory.recalled": lambda data: (
        f"{data.get('steps', '?')} steps lie in memory of {len(data.get('nodes', ()))} nodes: processes are sent there"
    ),
    "incident.closed": _incident_closed,
    "checkpoint.committed": _committed,
    "checkpoint.retried": lambda data: (
        f"the last state could not be saved; try {data.get('number', '?')} of {data.get('of', '?')} follows in "
        f"{data.get('after_s', '?')} s: {data.get('message', '?')}"
    ),
    "validation": _validation,
    "worker.started": _worker("started"),
    "worker.lost": _worker("lost"),
    "worker.leaving": _worker("is about to be taken away"),
    "worker.released": _worker("released"),
    "worker.straggler": _straggler,
    "node.suspected": lambda data: f"node {str(data.get('node_id'))[:12]} is suspected: {data.get('reason', '?')}",
    "node.cleared": lambda data: f"node {str(data.get('node_id'))[:12]} has passed its test",
    "supervisor.restarted": lambda data: (
        f"supervisor restarted: found {data.get('found', '?')} of {data.get('of', '?')} processes"
    ),
}


def seconds(value: Any) -> str:
    """`20 ms`, `1.3 s`, `42 s`, `3 min 20 s`, `2 h 05 min`; "?" when there is none."""
    if not isinstance(value, int | float) or value < 0:
        return "?"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def size_text(num_bytes: float) -> str:
    """Binary units: `12.5 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _pairs(data: Data) -> str:
    return " ".join(f"{key}={value}" for key, value in data.items())
