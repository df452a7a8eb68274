"""A run on one machine without Ray and without a supervisor: engine, store and checkpoints of one rank.

Rank 0 prints one line per step, and one line of JSON at the end. If a rank dies, the run ends (torchrun may start it
again, which resumes from the newest committed checkpoint), and rank 0 commits a checkpoint once all its parts are
durable. The layout is the one that `parallelism` fixes, else fully sharded. Checkpoints are in the directory that
--checkpoint-dir or `checkpoint.url` names, else in ./NAME-checkpoints. A run continues from those that it finds there,
if the spec is the same. Called by run.py, and by `shoal.run` where no service runs the program.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # mypy sees half

from shoal_workers.checkpoint.commit import checkpoint_names, newest_committed
from shoal_workers.checkpoint.spec_note import SpecChanged, note_spec
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.contract import (
    Assignment,
    ContinueFrom,
    ElasticitySpec,
    ExitKind,
    GroupFormed,
    JobSpec,
    Layout,
    LoopSpec,
    ParallelismSpec,
    PreemptionNotice,
    ProofDemand,
    ReplayMismatch,
    ReplicaMismatch,
    ReplicasEqual,
    SavedPart,
    SaveFailed,
    SnapshotCost,
    SnapshotsStopped,
    StepReport,
    StepSkipped,
    ValidationReport,
    WorkerExit,
    WorkerPoll,
    WorkerReport,
    WorkerSpec,
    fully_sharded,
    plan_of,
)
from shoal_workers.contract.checks.legality import fixed_layout, loop_layout, violations
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.network_interface import find_local_address
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.secrets import read_secrets
from shoal_workers.engine.state.saving import PartCollector
from shoal_workers.training_thread import run_engine

_GENERATION = 1
_COMMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class TorchrunEnvironment:
    """The rank that torchrun gave this process; a world of one if torchrun did not start it."""

    rank: int
    world_size: int
    host: str
    port: int | None
    restart: int
    """How many times torchrun has restarted this run."""

    @staticmethod
    def read() -> TorchrunEnvironment:
        port = os.environ.get("MASTER_PORT")
        return TorchrunEnvironment(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            port=int(port) if port else None,
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def shared_store(self, job: str) -> Store:
        """What the ranks exchange before they form a group: torchrun's store, or without torchrun one of our own."""
        if self.port is None:
            return HashStore()
        store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300))
        return PrefixStore(f"{job}/{self.restart}/run", store)

    def local_address(self) -> str:
        """Return this host's address on the route to torchrun's store."""
        return find_local_address(self.host, self.port or 1) or "127.0.0.1"


@dataclass(slots=True)
class Summary:
    """The content of the last line of the output."""

    steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    rates: list[float] = field(default_factory=list)
    num_checkpoints: int = 0

    def to_json(self, kind: ExitKind) -> str:
        return json.dumps(
            {
                "end": kind,
                "steps": self.steps,
                "loss": self.loss,
                "val_loss": self.val_loss,
                "val_bits_per_byte": self.val_bits_per_byte,
                "tokens_per_s": statistics.median(self.rates) if self.rates else None,
                "checkpoints": self.num_checkpoints,
            }
        )


def run_loop(loop: Callable[[Run], None]) -> None:
    """What `shoal.run(train)` does where no service runs the program: in this process, also under torchrun.

    It goes on from the newest checkpoint in the directory that SHOAL_CHECKPOINT_DIR names, by default
    `NAME-checkpoints` for a file NAME.py.

    Raises:
        SystemExit: the loop has failed; the reason is on stderr.
    """
    file = Path(sys.argv[0]).name or "loop"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(file).stem).strip("-._")[:63] or "loop"
    spec = JobSpec(
        name=name,
        loop=LoopSpec(file=file),
        worker=WorkerSpec(gpus=1 if torch.cuda.is_available() else 0),
        elasticity=ElasticitySpec(max_workers=TorchrunEnvironment.read().world_size),
    )
    status = train(spec, os.environ.get("SHOAL_CHECKPOINT_DIR"), changed_spec=False, loop=loop)
    if status:
        raise SystemExit(status)


def train(
    spec: JobSpec, checkpoint_dir: str | None, *, changed_spec: bool, loop: Callable[[Run], None] | None = None
) -> int:
    """Exit status 0 if the last step was reached.

    Args:
        changed_spec: the checkpoints that are found may be those of another spec, or of other data.
        loop: what `spec.loop` would give to `shoal.run`, if this process has it already.
    """
    environment = TorchrunEnvironment.read()
    os.environ.update(spec.code.env)
    os.environ.update(read_secrets(spec.secrets, os.environ))
    layout = layout_for(spec, environment.world_size)
    if spec.worker.gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    root = str(checkpoint_dir or spec.checkpoint.url or f"{spec.name}-checkpoints")
    absolute_root = _absolute(root)
    outbox = Outbox(f"rank-{environment.rank}")
    shared = environment.shared_store(spec.name)
    if environment.rank == 0:
        newest = _find_newest(spec, root, may_differ=changed_spec)
        shared.set("attempt", str(_next_attempt(root)))
        shared.set("restore_from", _absolute(newest))
        shared.set("key", secrets.token_hex(16))
    store = StoreServer(environment.local_address(), shared.get("key").decode())
    if environment.rank == 0:
        shared.set("address", json.dumps([store.host, store.port]))
    host, port = json.loads(shared.get("address"))
    if spec.code.working_dir:
        _enter(Path(spec.code.working_dir).expanduser())
    engine = Engine(
        spec,
        checkpoint_root=absolute_root,
        outbox=outbox,
        store=store,
        may_change_data=changed_spec,
        loop=loop,
    )
    attempt = int(shared.get("attempt"))
    assignment = Assignment(
        job_id=spec.name,
        attempt=attempt,
        generation=_GENERATION,
        rank=environment.rank,
        layout=layout,
        store_host=host,
        store_port=port,
        restore_from=shared.get("restore_from").decode() or None,
        proof=ProofDemand.IF_POSSIBLE if layout.planned_axes else ProofDemand.NONE,
        commit_timeout_s=0.0 if environment.rank else _COMMIT_S,  # the others wait for rank 0 to validate
    )
    summary = Summary()
    parts = PartCollector(
        spec.name,
        attempt,
        environment.rank,
        shared,
        on_commit=lambda step, error: engine.note_commit(_GENERATION, step, error),
    )

    def read(poll: WorkerPoll) -> None:
        for report in poll.reports:
            if isinstance(report, SavedPart):
                parts.add(report)
            _show(report, summary)

    try:
        ended = run_engine(engine, outbox, lambda: engine.run(assignment), lambda: engine.interrupt(_GENERATION), read)
    finally:
        summary.num_checkpoints = parts.close()
    return _conclude(ended, environment, summary)


def layout_for(spec: JobSpec, world_size: int) -> Layout:
    """Return the degrees that `parallelism` fixes; fully sharded if it is "auto", because the planner belongs to the
    service.

    Raises:
        SystemExit: the degrees do not multiply to the world size, or the layout is not legal; the message tells why.
    """
    if spec.loop is not None:
        return _find_loop_layout(spec.parallelism, world_size)
    fixed, plan = spec.parallelism, plan_of(spec)
    if not isinstance(fixed, ParallelismSpec):
        return fully_sharded(world_size)
    layout = fixed_layout(fixed, world_size, plan)
    if layout is None:
        raise SystemExit(
            f"parallelism needs {'' if fixed.dp_shard != 'auto' else 'a multiple of '}{fixed.unit} ranks, and torchrun "
            f"started {world_size}. Start another number (--nproc-per-node), or change the degrees."
        )
    broken = violations(layout, spec, plan)
    if broken:
        raise SystemExit(
            "\n".join(f"parallelism.{violation.axis}: {violation.message} ({violation.rule})" for violation in broken)
        )
    return layout


def _find_loop_layout(parallelism: ParallelismSpec | Literal["auto"], world_size: int) -> Layout:
    layout = loop_layout(parallelism, world_size)
    if layout.world_size != world_size:
        raise SystemExit(
            f"parallelism needs a multiple of {layout.world_size} ranks, and torchrun started {world_size}, of which "
            "none can be idle. Start another number (--nproc-per-node), or set parallelism.otherwise to replan."
        )
    return layout


def _find_newest(spec: JobSpec, root: str, *, may_differ: bool) -> str:
    """Return the checkpoint from which this run continues; empty: it begins. On rank 0 only.

    Raises:
        SystemExit: there are checkpoints of another spec; the message tells how to go on.
    """
    newest = newest_committed(root) or ""
    try:
        note_spec(root, spec, may_differ=may_differ or not newest)
        if not newest and spec.continue_from is not None:
            newest = _find_origin(spec.continue_from)
    except SpecChanged as error:
        raise SystemExit(
            f"{error} To continue from {newest} all the same, add --changed-spec; to begin anew, name another "
            "directory with --checkpoint-dir."
        ) from None
    _print(f"continues from {newest}" if newest else f"begins; its checkpoints are in {root}")
    return newest


def _find_origin(origin: ContinueFrom) -> str:
    """Without a service, nothing looks up the other job's checkpoint."""
    if origin.url is None:
        raise SystemExit(f"continue_from.job {origin.job}: only the service knows its jobs; set continue_from.url too.")
    return origin.url


def _absolute(url: str) -> str:
    """A path does not depend on the working directory, which a task may change; an address stays."""
    return url if not url or "://" in url else str(Path(url).absolute())


def _enter(code: Path) -> None:
    """Make the process look like a worker of the service, which starts in the code of its job."""
    if not code.is_dir():
        raise SystemExit(f"code.working_dir {code} is not a directory here: name the one that has the job's code.")
    os.chdir(code)
    sys.path.insert(0, str(Path.cwd()))


def _next_attempt(root: str) -> int:
    """One more than the newest attempt in this directory, so that no checkpoint directory is written twice."""
    return 1 + max((name.attempt for name in checkpoint_names(open_directory(root))), default=0)


def _show(item: WorkerReport, summary: Summary) -> None:
    match item:
        case GroupFormed():
            origin = "from the seed" if item.start_step == 0 else f"from step {item.start_step}"
            of = f", {item.num_parameters:,} parameters" if item.num_parameters else ""
            end = f" to {item.total_steps}" if item.total_steps is not None else ""
            _print(f"formed in {item.form_s:.2f} s{of}, {origin}{end}")
        case StepReport():
            summary.steps, summary.loss = item.step, item.loss
            _print(f"step {item.step}{''.join(f'  {text}' for text in _figures(item, summary))}")
        case ValidationReport():
            summary.val_loss, summary.val_bits_per_byte = item.loss, item.bits_per_byte
            metrics = _metrics(item.metrics)
            _print(f"validation after step {item.step}: loss {item.loss:.6f} on {item.samples} samples{metrics}")
        case SaveFailed():
            _print(f"rank {item.rank} could not save step {item.step}: {item.error}")
        case StepSkipped():
            _print(f"step {item.step} skipped: loss {item.loss}, norm {item.grad_norm}")
        case ReplayMismatch():
            _print(f"rank {item.rank} computes wrong: {item.message}")
        case ReplicaMismatch():
            _print(item.message)
        case ReplicasEqual() | SavedPart() | PreemptionNotice() | SnapshotCost() | SnapshotsStopped():
            pass


def _figures(item: StepReport, summary: Summary) -> Iterator[str]:
    """What a step has reported, in words."""
    if item.loss is not None:
        yield f"loss {item.loss:.6f}"
    if item.grad_norm is not None:
        yield f"norm {item.grad_norm:.4f}"
    if item.lr is not None:
        yield f"lr {item.lr:.3g}"
    if item.tokens is not None:
        summary.rates.append(item.tokens / item.step_s)
        yield f"{summary.rates[-1]:,.0f} tokens/s"
    yield f"{item.step_s * 1000:.1f} ms{_metrics(item.metrics)}"


def _metrics(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.6g}" for name, value in metrics.items())


def _conclude(ended: WorkerExit, environment: TorchrunEnvironment, summary: Summary) -> int:
    if ended.error is not None:
        text = ended.error.traceback or f"{ended.error.sentence}\n"
        sys.stderr.write(f"rank {ended.rank}: {ended.kind} after step {ended.step}\n{text}")
    if environment.rank == 0:
        _print(summary.to_json(ended.kind))
    return 0 if ended.kind is ExitKind.FINISHED else 1


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
