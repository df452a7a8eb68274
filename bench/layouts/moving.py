"""Moving a large state from one layout's snapshot in memory into another layout, against the machine's memcpy.

    old layout -> twice, as in training: create and drop gradients, snapshot -> free the model -> build model and
    optimizer of the new layout -> all ranks read their parts at once (timed) -> first snapshot of the new layout

The engine runs without Ray: real groups of 4 processes, snapshot stores under /dev/shm. The reference rate is measured
right before each move: all processes copy at the same time from one warm buffer into another. Copying into untouched
pages is measured too. Each move is made three times, and the one with the median share counts. Extra memory is the
peak of a process beyond its memory while it trained in the old layout, as a multiple of one rank's state.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from layouts.tensor_pages import reset_peak, status_bytes
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.engine.group.mesh import build_mesh
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.parallel.assemble import assemble
from shoal_workers.engine.process.warm_memory import keep_freed_memory
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.update import Update, build_update
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.snapshot_store.store import SnapshotStore

LEAST_SHARE = 0.5
MOST_EXTRA = 1.3
_WORLD = 4
_COPY_BYTES = 256 << 20
_COPIES = 3
_CYCLES = 3
"""Passes through all layouts."""
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
_SIZES = {200: {"dim": 1024, "num_layers": 16}, 10: {"dim": 384, "num_layers": 6}}
"""Millions of parameters."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move, all ranks together."""

    before: str
    after: str
    state_bytes: int
    load_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    """Rate of copying of all processes at once, right before the move."""
    share: float
    """`bytes_per_s` as a share of the rate of copying."""
    cpu_s: float
    """Processor time of all ranks during the reading."""
    fresh_bytes: int
    """Bytes of pages that were touched for the first time during the reading."""
    build_s: float
    """Seconds to build groups, model and optimizer of the new layout."""
    extra: float
    """Extra memory of the worst rank at its peak, as a multiple of its state."""


@dataclass(frozen=True, slots=True)
class Moves:
    fresh_bytes_per_s: float
    """Rate of copying into untouched pages, all processes at once."""
    moves: tuple[Move, ...]


def measure_moves(say: Callable[[str], None], *, millions: int = 200) -> Moves:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["layouts.moving"])
        ends, processes = [], []
        for rank in range(_WORLD):
            ours, theirs = multiprocessing.Pipe()
            process = context.Process(target=_run_rank, args=(rank, folder, millions, theirs), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            fresh: float = _answers(ends)[0]
            moves = [_printed(_move(before, after, _answers(ends)), say) for before, after in _pairs()]
            return Moves(fresh, tuple(_median(moves[place :: len(_LAYOUTS) - 1]) for place in range(len(_LAYOUTS) - 1)))
        finally:
            for process in processes:
                process.join(10.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def summary(found: Moves) -> dict[str, Any]:
    """For the JSON."""
    share, extra = min(move.share for move in found.moves), max(move.extra for move in found.moves)
    return {
        **asdict(found),
        "least_share": share,
        "share_wanted": LEAST_SHARE,
        "largest_extra": extra,
        "extra_allowed": MOST_EXTRA,
        "passed": share >= LEAST_SHARE and extra <= MOST_EXTRA,
    }


def _pairs() -> list[tuple[Layout, Layout]]:
    return list(pairwise(_LAYOUTS)) * _CYCLES


def _move(before: Layout, after: Layout, ranks: list[dict[str, float]]) -> Move:
    size = sum(int(rank["bytes"]) for rank in ranks)
    load_s = max(rank["load_s"] for rank in ranks)
    copying = min(rank["copy_bytes_per_s"] for rank in ranks)
    return Move(
        before=before.describe(),
        after=after.describe(),
        state_bytes=size,
        load_s=load_s,
        bytes_per_s=size / load_s,
        copy_bytes_per_s=copying,
        share=size / load_s / copying,
        cpu_s=sum(rank["cpu_s"] for rank in ranks),
        fresh_bytes=sum(int(rank["fresh_bytes"]) for rank in ranks),
        build_s=max(rank["build_s"] for rank in ranks),
        extra=max(rank["extra_bytes"] / max(rank["bytes"], 1) for rank in ranks),
    )


def _printed(move: Move, say: Callable[[str], None]) -> Move:
    say(
        f"{move.before} -> {move.after}: {move.state_bytes / 1e9:.2f} GB in {move.load_s:.2f} s, "
        f"{100 * move.share:.0f} % of copying ({move.copy_bytes_per_s / 1e9:.1f} GB/s), {move.extra:.2f} x a rank's "
        f"state; {move.cpu_s:.2f} s of CPU time, {move.fresh_bytes / 1e9:.2f} GB of fresh pages"
    )
    return move


def _median(moves: list[Move]) -> Move:
    return sorted(moves, key=lambda move: move.share)[len(moves) // 2]


def _answers(ends: list[Connection]) -> list[Any]:
    for end in ends:
        if not end.poll(_PATIENCE_S):
            raise RuntimeError(f"a rank has not answered within {_PATIENCE_S:.0f} s")
    return [end.recv() for end in ends]


def _run_rank(rank: int, folder: str, millions: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=_WORLD,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    copy_rate = _CopyRate()
    connection.send(copy_rate.fresh_bytes_per_s())
    mover = _Mover(rank, Path(folder), millions, copy_rate)
    for generation, (before, after) in enumerate(_pairs(), start=1):
        connection.send(mover.move(generation, before, after))
    mover.close()
    dist.destroy_process_group()


class _CopyRate:
    """The machine's copying, in bytes per second of all processes together."""

    def __init__(self) -> None:
        self._source, self._target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))

    def warm_bytes_per_s(self) -> float:
        return _WORLD * _COPY_BYTES / min(_together(lambda: self._target.copy_(self._source)) for _ in range(_COPIES))

    def fresh_bytes_per_s(self) -> float:
        return _WORLD * _COPY_BYTES / _together(lambda: torch.empty_like(self._source).copy_(self._source))


def _together(action: Callable[[], object]) -> float:
    """Seconds until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


class _Mover:
    def __init__(self, rank: int, folder: Path, millions: int, copy_rate: _CopyRate) -> None:
        self._rank = rank
        self._copy_rate = copy_rate
        model = {**_SIZES[millions], "num_heads": 8, "num_kv_heads": 4, "seq_len": 128}
        data = {"corpus": "python-stdlib"}
        self._spec = parse_spec({"model": model, "data": data, "stop": {"steps": 1}, "elasticity": {"max_workers": 4}})
        self._task: LoadedTask = load_task(self._spec)
        self._store = SnapshotStore(
            job_id="bench", attempt=1, worker_id=f"s{rank}", node_id="n", key="key", root=folder
        )
        self._ends: list[SnapshotServer] = [SnapshotServer(node_id="", host="", port=0)] * _WORLD
        dist.all_gather_object(self._ends, SnapshotServer(node_id="n", host="127.0.0.1", port=self._store.port))
        self._view: StateView | None = None

    def move(self, generation: int, before: Layout, after: Layout) -> dict[str, float]:
        if self._view is None:
            self._view = self._build(before)
        for tensor in self._view.tensors().values():
            _local(tensor).fill_(float(generation))
        for _ in range(2):
            self._step(self._view, before, generation)
        reset_peak()
        had = _resident()
        self._view = None
        gc.collect()
        start = time.perf_counter()
        view = self._build(after)
        state = view.tensors()
        build_s = time.perf_counter() - start
        source = SnapshotSource(generation=generation, world_size=_WORLD, step=1, parts=tuple(self._ends))
        copy_bytes_per_s = self._copy_rate.warm_bytes_per_s()
        before_load = resource.getrusage(resource.RUSAGE_SELF)
        load_s = _together(lambda: self._store.load(state, source, check=_nothing))
        after_load = resource.getrusage(resource.RUSAGE_SELF)
        peak = status_bytes("VmHWM")
        assert all(bool((_local(tensor) == generation).all()) for tensor in state.values())
        self._view = view
        return {
            "bytes": float(sum(_local(tensor).nbytes for tensor in state.values())),
            "copy_bytes_per_s": copy_bytes_per_s,
            "load_s": load_s,
            "cpu_s": (after_load.ru_utime + after_load.ru_stime) - (before_load.ru_utime + before_load.ru_stime),
            "fresh_bytes": float((after_load.ru_minflt - before_load.ru_minflt) * resource.getpagesize()),
            "build_s": build_s,
            "extra_bytes": float(peak - had),
        }

    def close(self) -> None:
        self._store.close()

    def _build(self, layout: Layout) -> StateView:
        """Build model and optimizer as the engine does before a restore."""
        meshes = build_mesh(layout, "cpu", _TIMEOUT_S, self._rank)
        model = build_for_restore(self._task.build_model)
        assembly = assemble(model, self._spec, plan_of(self._spec), meshes, self._task.shard_units)
        update: Update = build_update(self._task, assembly, self._spec)
        update.materialise_state()
        return StateView(assembly, update)

    def _step(self, view: StateView, layout: Layout, generation: int) -> None:
        """The effect of a step on memory: the pages of its gradients, which the process keeps, and a snapshot."""
        state = view.tensors()
        gradients = [torch.ones_like(_local(tensor)) for name, tensor in state.items() if name.startswith("model.")]
        del gradients
        self._store.snapshot(
            state,
            generation=generation,
            rank=self._rank,
            world_size=_WORLD,
            step=1,
            extra={},
            owns_replicated=layout.owns_replicated(self._rank),
        )
        dist.barrier()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resident() -> int:
    return sum(status_bytes(field) for field in ("RssAnon", "RssFile", "RssShmem"))


def _nothing() -> None:
    pass
