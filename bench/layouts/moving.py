"""Moving a large state from one layout into another with the real engine, against copying as many bytes.

    old layout: trains some steps, yields -> new layout: build, read, first step, .. yields -> all ranks copy at once

Engines without Ray, snapshot stores under /dev/shm; nothing of a change of layout is left out but the supervisor. The
reading is what `SnapshotStore.load` does, its planning included, from the start of all ranks together until the last
one's end. For comparison, all ranks copy together, each as many bytes as it has read, between buffers in shared memory
whose pages are in place: the kind of memory that states are in. No way to move the state can be faster than that.
Each move is made once, its reading three times, of which the median counts, as of three copies. Extra memory is the
peak of a process until the end of its first step in the new layout, beyond its memory when it left the old one, as a
multiple of one rank's state.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from layouts.moving_rank import Interval, Passage, RankMove, serve
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource

LEAST_SHARE = 0.5
MOST_EXTRA = 1.3
_WORLD = 4
_COPIES = 3
_TIMEOUT_S = 120.0
_PATIENCE_S = 280.0
_LAYOUTS = (
    Layout(dp_shard=4),
    Layout(pp=2, tp=2, schedule=Schedule.GPIPE),
    Layout(dp_shard=4),
    Layout(tp=4),
    Layout(dp_shard=2, tp=2),
    Layout(pp=4, schedule=Schedule.GPIPE),
    Layout(dp_shard=4),
)
_SIZES = {
    200: {"dim": 1024, "num_layers": 16},
    50: {"dim": 512, "num_layers": 16},
    10: {"dim": 384, "num_layers": 6},
}
"""Models by millions of parameters."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move, all ranks together."""

    before: str
    after: str
    state_bytes: int
    load_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    """Rate of copying the same bytes, all ranks at once, right after the move."""
    share: float
    """`bytes_per_s` as a share of the rate of copying."""
    cpu_s: float
    """CPU time of all ranks during the reading."""
    copy_cpu_s: float
    """CPU time of all ranks to copy the same bytes."""
    fresh_bytes: int
    """Bytes of pages that were touched for the first time during the reading."""
    build_s: float
    """Seconds to build model and optimizer of the new layout."""
    change_s: float
    """Seconds from the assignment to the end of the first step."""
    change_cpu_s: float
    """CPU time of all ranks in it."""
    extra: float
    """Extra memory of the worst rank at its peak, as a multiple of its state."""


@dataclass(frozen=True, slots=True)
class Moves:
    moves: tuple[Move, ...]


def measure_moves(say: Callable[[str], None], *, millions: int = 200) -> Moves:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["layouts.moving_rank"])
        ends, processes = [], []
        barrier = context.Barrier(_WORLD)
        for rank in range(_WORLD):
            ours, theirs = multiprocessing.Pipe()
            process = context.Process(target=serve, args=(theirs, _spec(millions), folder, rank, barrier), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            ports: list[tuple[int, int]] = _answers(ends)
            return Moves(tuple(_printed(move, say) for move in _Mover(ends, ports).moves()))
        finally:
            for end in ends:
                with suppress(OSError):  # the process has died, which was reported before
                    end.send(None)
            for process in processes:
                process.join(10.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def summary(found: Moves) -> dict[str, Any]:
    """Makes the summary that is written as JSON."""
    share, extra = min(move.share for move in found.moves), max(move.extra for move in found.moves)
    return {
        **asdict(found),
        "least_share": share,
        "share_wanted": LEAST_SHARE,
        "largest_extra": extra,
        "extra_allowed": MOST_EXTRA,
        "passed": share >= LEAST_SHARE and extra <= MOST_EXTRA,
    }


class _Mover:
    def __init__(self, ends: list[Connection], ports: list[tuple[int, int]]) -> None:
        self._ends = ends
        self._store_port = ports[0][0]
        self._servers = tuple(SnapshotServer(node_id="n", host="127.0.0.1", port=port) for _, port in ports)
        self._generation = 1
        self._step = 0

    def moves(self) -> Iterator[Move]:
        self._step = self._run(_LAYOUTS[0], None)[0]
        for before, after in pairwise(_LAYOUTS):
            yield self._move(before, after)

    def _move(self, before: Layout, after: Layout) -> Move:
        source = SnapshotSource(generation=self._generation, world_size=_WORLD, step=self._step, parts=self._servers)
        self._generation += 1
        ranks: list[RankMove] = self._run(after, source)
        self._step = ranks[0].step
        size = sum(rank.state_bytes for rank in ranks)
        load_s, load_cpu_s = _medians([_together(passages) for passages in zip(*(r.loads for r in ranks), strict=True)])
        copy_s, copy_cpu_s = self._copied([rank.state_bytes for rank in ranks])
        return Move(
            before=before.describe(),
            after=after.describe(),
            state_bytes=size,
            load_s=load_s,
            bytes_per_s=size / load_s,
            copy_bytes_per_s=size / copy_s,
            share=copy_s / load_s,
            cpu_s=load_cpu_s,
            copy_cpu_s=copy_cpu_s,
            fresh_bytes=sum(rank.fresh_bytes for rank in ranks),
            build_s=ranks[0].build_s,
            change_s=_seconds([rank.change for rank in ranks]),
            change_cpu_s=sum(rank.change_cpu_s for rank in ranks),
            extra=max(rank.extra_bytes / max(rank.state_bytes, 1) for rank in ranks),
        )

    def _copied(self, sizes: list[int]) -> tuple[float, float]:
        """Copies `sizes` bytes, one size per rank. Returns medians of wall seconds, and of CPU seconds of all ranks."""
        passes = []
        for _ in range(_COPIES):
            for end, size in zip(self._ends, sizes, strict=True):
                end.send(size)
            copies: list[Passage] = _answers(self._ends)
            passes.append(_together(copies))
        return _medians(passes)

    def _run(self, layout: Layout, source: SnapshotSource | None) -> list[Any]:
        for rank, end in enumerate(self._ends):
            end.send(
                Assignment(
                    job_id="bench",
                    attempt=1,
                    generation=self._generation,
                    rank=rank,
                    layout=layout,
                    store_host="127.0.0.1",
                    store_port=self._store_port,
                    restore_from=None,
                    restore_snapshot=source,
                    collective_timeout_s=_TIMEOUT_S,
                )
            )
        return _answers(self._ends)


def _together(passages: Sequence[Passage]) -> tuple[float, float]:
    """Seconds, and CPU seconds, of all ranks together."""
    return _seconds([one.interval for one in passages]), sum(one.cpu_s for one in passages)


def _medians(passes: list[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu_seconds = zip(*passes, strict=True)
    return statistics.median(seconds), statistics.median(cpu_seconds)


def _seconds(intervals: list[Interval]) -> float:
    """Seconds from the first start to the last end."""
    return max(one.end_s for one in intervals) - min(one.start_s for one in intervals)


def _printed(move: Move, say: Callable[[str], None]) -> Move:
    say(
        f"{move.before} -> {move.after}: {move.state_bytes / 1e9:.2f} GB in {move.load_s:.2f} s, "
        f"{100 * move.share:.0f} % of copying ({move.copy_bytes_per_s / 1e9:.1f} GB/s), {move.cpu_s:.2f} s of CPU time "
        f"({move.copy_cpu_s:.2f} s to copy), "
        f"{move.fresh_bytes / 1e9:.2f} GB of fresh pages; until the end of the first step {move.change_s:.2f} s, "
        f"{move.change_cpu_s:.2f} s of CPU time, {move.extra:.2f} x a rank's state of extra memory"
    )
    return move


def _answers(ends: list[Connection]) -> list[Any]:
    for end in ends:
        if not end.poll(_PATIENCE_S):
            raise RuntimeError(f"a rank has not answered within {_PATIENCE_S:.0f} s")
    return [end.recv() for end in ends]


def _spec(millions: int) -> dict[str, Any]:
    return {
        "name": "moving",
        "task": LM_TASK,
        "model": {**_SIZES[millions], "num_heads": 8, "num_kv_heads": 4, "seq_len": 8},
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": _WORLD, "micro_size": 1},
        "stop": {"steps": 1_000_000},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": _WORLD},
    }
