"""Proves layouts on this machine alone: each with as many forked processes as it has ranks, one layout after the other.

    Zygote     forked while its process has one thread and has imported torch; waits until it is asked
      == fork ==> rank 0, rank 1 ...     load the task, form a gloo group over a file, and call `engine.proof`

The ranks train nothing and write nothing but their answer. Used by `shoal check`, by tests, and by the table of proofs
(`python bench/proofs.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

from shoal_workers.contract import (
    PLANNED_AXES,
    Assignment,
    JobSpec,
    Layout,
    LayoutProof,
    ParallelismSpec,
    ParallelPlan,
    Phase,
    ProofOutcome,
    data_parallel,
    fully_sharded,
    plan_of,
)
from shoal_workers.contract.checks.legality import fixed_layout, is_plain_by_default, violations
from shoal_workers.contract.layout import plain
from shoal_workers.engine.generation_ends import LayoutRefused, TaskFailed
from shoal_workers.engine.group.collectives import CollectiveLog, is_collective_error
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.mesh import build_mesh
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.proof.prove import prove
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.task import load_task
from shoal_workers.engine.task.user_code import UserCode

_FORK = multiprocessing.get_context("fork")
_COLLECTIVE_S = 30.0
"""Ranks that call different collectives wait for each other this long."""
_BROKEN = "a collective failed"
_MOST_RANKS = 8
"""Processes that a proof may have on this machine."""


def layouts_to_prove(spec: JobSpec) -> tuple[Layout, ...]:
    """The data axis, each axis that the plan names, and what `parallelism` fixes with degrees of at most 2: those of
    them that are legal."""
    plan = plan_of(spec)
    layouts = [data_layout(spec, 2)]
    if plan is not None:
        layouts += [Layout(tp=2)] if plan.tensor else []
        layouts += [Layout(pp=2)] if plan.blocks and plan.num_blocks > 1 and plan.hidden_size else []
        layouts += [Layout(cp=2)] if plan.attention and plan.sequence else []
        layouts += [Layout(dp_shard=2, ep=2)] if plan.experts else []
    if (fixed := fixed_to_prove(spec)) is not None:
        layouts.append(fixed)
    enough = spec.batch.model_copy(update={"global_size": spec.batch.micro_size * _MOST_RANKS})
    sized = spec.model_copy(update={"batch": enough})
    return tuple(
        dict.fromkeys(layout for layout in layouts if layout.world_size > 1 and not violations(layout, sized, plan))
    )


def data_layout(spec: JobSpec, world_size: int) -> Layout:
    """Return the data axis that the service would choose, if whole states fit."""
    return plain(world_size) if is_plain_by_default(spec) else data_parallel(spec.parallelism, world_size)


def fixed_to_prove(spec: JobSpec) -> Layout | None:
    """What is proven of the layout that the spec fixes; None if it fixes none, or a single process."""
    if not isinstance(spec.parallelism, ParallelismSpec):
        return None
    layout = _with_few_ranks(spec.parallelism, plan_of(spec))
    return layout if layout.world_size > 1 else None


def _with_few_ranks(fixed: ParallelismSpec, plan: ParallelPlan | None) -> Layout:
    """Return the fixed layout with as few ranks of each axis as show what it does."""
    shard = 2 if fixed.dp_shard == "auto" else min(fixed.dp_shard, 2)
    degrees = {axis: min(getattr(fixed, axis), 2) for axis in (*PLANNED_AXES, "dp_replicate")}
    few = fixed.model_copy(update={**degrees, "dp_shard": max(shard, degrees["ep"])})
    if few.dp_shard == 2 and few.unit > _MOST_RANKS and few.ep == 1:
        few = few.model_copy(update={"dp_shard": 1})
    ranks = few.model_degree * few.dp_replicate * int(few.dp_shard)
    return fixed_layout(few, ranks, plan) or fully_sharded(1)


def prove_layouts(spec: JobSpec, layouts: Iterable[Layout], *, limit_s: float = 120.0) -> Iterator[LayoutProof]:
    """Make one proof for each layout. The process must have one thread.

    Raises:
        TaskFailed: the task's own code raised with the whole model.
    """
    spec = spec.model_copy(update={"worker": spec.worker.model_copy(update={"gpus": 0})})
    for layout in layouts:
        yield _prove_layout(spec, layout, limit_s)


def _prove_layout(spec: JobSpec, layout: Layout, limit_s: float) -> LayoutProof:
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        place = Path(folder)
        ranks = [_FORK.Process(target=_run_rank, args=(spec, layout, rank, place)) for rank in range(layout.world_size)]
        for rank in ranks:
            rank.start()
        is_late = _wait(ranks, time.monotonic() + limit_s)
        answers = [LayoutProof.model_validate_json(file.read_text()) for file in sorted(place.glob("answer-*"))]
        errors = [file.read_text() for file in sorted(place.glob("error-*"))]
    refused = next((answer for answer in answers if answer.outcome is ProofOutcome.REFUSED), None)
    if refused is not None:
        return refused
    if len(answers) == layout.world_size:
        return answers[0]
    if len(errors) + len(answers) == layout.world_size and all(_BROKEN in error for error in errors):
        message = "cannot be computed: its ranks wait for each other in different collectives."
        message = f"the layout {layout.describe()} {message}"
        return LayoutProof(layout=layout, outcome=ProofOutcome.REFUSED, words=message)
    message = f"it took longer than {limit_s:g} s" if is_late else "".join(errors[:1]) or "a process of it has crashed"
    return LayoutProof(layout=layout, outcome=ProofOutcome.UNPROVEN, words=message)


def _wait(ranks: Sequence[ForkProcess], deadline_mono: float) -> bool:
    """Wait until all have ended. Return True if they were killed at the deadline."""
    for rank in ranks:
        rank.join(max(0.0, deadline_mono - time.monotonic()))
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
        rank.join()
    return bool(late)


def _run_rank(spec: JobSpec, layout: Layout, rank: int, place: Path) -> None:
    """Run in the process of a rank, and never return: threads that the task has left are not waited for."""
    status = 1
    try:
        (place / f"answer-{rank}.part").write_text(_prove_on_rank(spec, layout, rank, place).model_dump_json())
        (place / f"answer-{rank}.part").rename(place / f"answer-{rank}")
        status = 0
    except TaskFailed as error:
        (place / f"error-{rank}").write_text(error.report.sentence)
    except BaseException as error:
        traceback.print_exc()
        is_broken = isinstance(error, Exception) and is_collective_error(error)
        (place / f"error-{rank}").write_text(f"{_BROKEN if is_broken else type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _prove_on_rank(spec: JobSpec, layout: Layout, rank: int, place: Path) -> LayoutProof:
    torch.set_num_threads(1)
    position = Position()
    with UserCode(lambda: Phase.PREPARING):
        task = load_task(spec)
        task.prepare(position.note)
        task.open_data()
    choose_interface("127.0.0.1", 1)
    dist.init_process_group("gloo", init_method=f"file://{place / 'group'}", rank=rank, world_size=layout.world_size)
    generation = Generation(
        spec=spec,
        assignment=Assignment(
            job_id="proof",
            attempt=1,
            generation=1,
            rank=rank,
            layout=layout,
            store_host="",
            store_port=0,
            restore_from=None,
        ),
        task=task,
        meshes=build_mesh(layout, "cpu", _COLLECTIVE_S, rank),
        device=torch.device("cpu"),
        position=position,
        outbox=Outbox("proof"),
        fence=Fence().of(1),
        plan=plan_of(spec) or ParallelPlan(),
        collectives=CollectiveLog(),
    )
    try:
        proof = prove(generation, _broadcast_text)
    except LayoutRefused as refused:
        return refused.proof
    dist.barrier()  # else the others find a broken connection
    return proof


def _broadcast_text(text: str) -> str:
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class Zygote:
    """A process that was forked early, to prove layouts later. Not thread-safe."""

    def __init__(self, spec: JobSpec) -> None:
        """Call it while the process has one thread."""
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(spec, self._pipe, theirs))
        self._process.start()
        theirs.close()

    def proofs(self, layouts: Sequence[Layout]) -> Iterator[LayoutProof]:
        """Once. Fewer than there are layouts: the process has ended."""
        self._pipe.send(layouts)
        for _ in layouts:
            try:
                yield self._pipe.recv()
            except (EOFError, OSError):
                return

    def close(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        self._process.join()


def _serve(spec: JobSpec, parents: Connection, pipe: Connection) -> None:
    """Run in the forked process."""
    parents.close()  # else this process would not see that the other one has ended
    with suppress(EOFError):
        for proof in prove_layouts(spec, pipe.recv()):
            pipe.send(proof)
