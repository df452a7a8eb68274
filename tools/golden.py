"""Writes what this release puts on the wire and into its stores: tests/golden/wire-N, with N = WIRE_VERSION.

    python tools/golden.py              documents as JSON and as pickle (Ray's form), fingerprints of their schemas, and
                                        of the calls of workers and agents
    python tools/golden.py --release    at a release: writes the checksum of the folder into tests/golden/released.json

A later release must read all of them; version 3 is the first. The folder of a released version is never written again:
a document or a call that changes after a release needs a new WIRE_VERSION. Run by `make docs`;
tests/unit/tools/test_golden.py compares the folders with their checksums, and the newest with what is written today.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import (
    CheckpointFound,
    Command,
    Emit,
    End,
    IssuedOrder,
    ReportArrived,
    RunReturned,
    ShowIncident,
    SuspectNode,
    WorkerLost,
    WorkerWarm,
)
from shoal_service.core.attempt.state.attempt import Attempt, AttemptConfig, Target
from shoal_service.core.attempt.state.parts import Opening
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.home import DirectiveAnswer, HomeReport, ReportReceipt
from shoal_service.planner import plan
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports, SuspectedNode
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.journal import JournalEntry, Unacknowledged
from shoal_service.views import CheckpointView, Condition, IncidentView, JobStatus, WorkerView
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.job import EndReason, IncidentCause, JobState
from shoal_workers.contract.marker import CommitMarker
from shoal_workers.contract.messages import (
    Assignment,
    ExitKind,
    LogLine,
    Phase,
    Progress,
    WorkerConfig,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
)
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import GroupFormed, SavedFile, SavedPart, StepReport, WorkerReport
from shoal_workers.version import VERSION

ROOT = Path(__file__).resolve().parents[1] / "tests" / "golden"
RELEASES = ROOT / "released.json"
CALLS = (
    ("workers/shoal_workers/actor.py", "WorkerActor"),
    ("workers/shoal_workers/poll_agent/agent.py", "PollAgent"),
)
"""Classes whose public methods other processes call, which may be of another release."""
TYPES: tuple[type[BaseModel], ...] = (
    JobSpec,
    SupervisorConfig,
    Directive,
    SupervisorReports,
    HomeReport,
    ReportReceipt,
    DirectiveAnswer,
    JobStatus,
    Assignment,
    WorkerConfig,
    WorkerInfo,
    WorkerPoll,
    WorkerExit,
    CommitMarker,
    JournalEntry,
)  # fmt: skip - one list, not twelve lines
SPEC = JobSpec.model_validate(
    {
        "name": "fish",
        "task": "m:T",
        "data": {"paths": ["a"]},
        "stop": {"steps": 12},
        "batch": {"global_size": 4, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": 2},
    }
)
PARTS = tuple(
    SavedPart(
        generation=1,
        step=4,
        rank=rank,
        world_size=2,
        directory="/checkpoints/j1/step-000000000004-a1-g1",
        files=(SavedFile(name=f"shard-0000{rank}.bin", bytes=100, crc32=7),),
        stall_s=0.1,
        write_s=0.2,
    )
    for rank in range(2)
)
STEP = StepReport(generation=1, step=4, at=1004.0, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=8, step_s=0.5, world_size=2)


def main() -> int:
    folder = ROOT / f"wire-{WIRE_VERSION}"
    known = released()
    if sys.argv[1:] == ["--release"]:
        known.setdefault(str(WIRE_VERSION), {"release": VERSION, "sha256": digest(folder)})
        RELEASES.write_text(_pretty(known), encoding="utf-8")
        return 0
    if str(WIRE_VERSION) in known:
        is_same = {path.name for path in folder.iterdir()} == set(written()) and all(
            without_pickle((folder / name).read_text("utf-8")) == without_pickle(text)
            for name, text in written().items()
        )
        if not is_same:
            print(f"{folder} is of a released version: raise WIRE_VERSION in shoal_workers/contract/base.py")
        return 0 if is_same else 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in written().items():
        if not (folder / name).exists() or without_pickle((folder / name).read_text("utf-8")) != without_pickle(text):
            (folder / name).write_text(text, encoding="utf-8")
    return 0


def released() -> dict[str, dict[str, str]]:
    """Reads, by version of the wire, the first release that wrote it, and the checksum of its folder."""
    found: dict[str, dict[str, str]] = json.loads(RELEASES.read_text("utf-8"))
    return found


def digest(folder: Path) -> str:
    """SHA-256 of the names and the bytes of all files."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def without_pickle(text: str) -> dict[str, Any]:
    """Leaves out the pickles, because a pickle of an equal value may have other bytes."""
    return {key: value for key, value in json.loads(text).items() if key != "pickle"}


def written() -> dict[str, str]:
    """The content of each file, by name. It is the same in every run."""
    files = {f"{name}.json": _pretty(_document(value)) for name, value in samples()}
    return {**files, "fingerprints.json": _pretty(fingerprints())}


def fingerprints() -> dict[str, str]:
    """A hash of the calls, and one of each document's schema: it changes whenever a field, a type or a default does,
    not with a description."""
    found = {_path(kind): _hash(kind.model_json_schema()) for kind in TYPES}
    found["WorkerReport"] = _hash(TypeAdapter(WorkerReport).json_schema())
    return found | {name: _hash(calls(path, name)) for path, name in CALLS}


def calls(path: str, name: str) -> dict[str, str]:
    """Public methods of a class and their parameters, read from its source: to import it would take seconds."""
    tree = ast.parse((ROOT.parents[1] / path).read_text("utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name: ast.unparse(one.args) for one in methods if not one.name.startswith("_")}


def read(document: dict[str, Any]) -> list[Any]:
    """Reads a golden document with today's code: from its JSON, and from its pickle if it has one."""
    module, _, name = document["type"].rpartition(".")
    found = [getattr(importlib.import_module(module), name).model_validate(document["json"])]
    if "pickle" in document:
        found.append(pickle.loads(base64.b64decode(document["pickle"])))
    return found


def samples() -> Iterator[tuple[str, BaseModel]]:
    info = _info(0)
    progress = Progress(generation=1, phase=Phase.FORWARD, step=4, at=1004.0, counter=9)
    part = SnapshotPart(generation=1, rank=0, world_size=2, step=4, num_bytes=10, node_id="n0")
    yield "spec", SPEC
    yield (
        "config",
        SupervisorConfig(
            job_id="j1", attempt=1, spec=SPEC, checkpoint_root="/checkpoints/j1", granted=2, epoch=3, spec_version=1
        ),
    )
    yield (
        "directive",
        Directive(
            epoch=3, granted=2, desired=Desired.RUN, elasticity=SPEC.elasticity, parallelism="auto", spec_version=1
        ),
    )
    yield "reports", _reports()
    yield "status", JobStatus(state=JobState.RUNNING, step=4, loss=2.5, workers=2)
    yield (
        "worker_config",
        WorkerConfig(job_id="j1", attempt=1, worker_id="w0", checkpoint_root="/checkpoints/j1", snapshot_key="secret"),
    )
    yield "worker_info", info
    yield (
        "worker_poll",
        WorkerPoll(
            worker_id="w0",
            seq=5,
            reports=(STEP, *PARTS),
            logs=(LogLine(at=1.0, stream="stdout", text="hello"),),
            progress=progress,
        ),
    )
    yield (
        "worker_exit",
        WorkerExit(generation=1, rank=0, kind=ExitKind.INTERRUPTED, step=4, snapshot_parts=(part,), at=1005.0),
    )
    yield (
        "marker",
        CommitMarker(
            job_id="j1", attempt=1, generation=1, step=4, world_size=2, committed_at=1004.5, files=PARTS[0].files
        ),
    )
    for stage, state, commands in _states():
        event = PendingEvent(at=1.0, type="worker.started", data={"pid": 7})
        orders = [command for command in commands if not isinstance(command, (Emit, ShowIncident, SuspectNode, End))]
        yield (
            f"journal_{stage}",
            JournalEntry(
                version=WIRE_VERSION,
                life=1,
                state=state,
                seq=9,
                unacknowledged=(Unacknowledged(seq=9, item=event),),
                issued=tuple(IssuedOrder(number, order) for number, order in enumerate(orders)),
                num_orders=len(orders),
            ),
        )


def _states() -> Iterator[tuple[str, Attempt, tuple[Command, ...]]]:
    """An attempt that starts, trains, and loses a worker."""
    state = Attempt(
        config=AttemptConfig(job_id="j1", attempt=1, checkpoint_root="/checkpoints/j1"),
        target=Target(spec=SPEC, granted=2),
        current=Opening(since=1000.0),
    )
    yield "opening", state, machine.open_attempt(state)
    state, commands = machine.step(state, CheckpointFound(None), 1001.0, plan)
    yield "starting", state, commands
    for index in range(2):
        state, commands = machine.step(state, WorkerWarm(index, _info(index)), 1002.0, plan)
    yield "forming", state, commands
    formed = GroupFormed(
        generation=1, at=1003.0, start_step=0, total_steps=12, form_s=0.1, build_s=0.1, restore_s=0.1, num_parameters=10
    )
    for item in (formed, STEP, *PARTS):
        state, commands = machine.step(state, ReportArrived(getattr(item, "rank", 0), item), 1004.0, plan)
    yield "running", state, commands
    lost = WorkerLost(1, IncidentCause.WORKER_DIED, "run call", "killed by signal 9")
    state, commands = machine.step(state, lost, 1005.0, plan)
    yield "quiescing", state, commands
    left = WorkerExit(generation=1, rank=0, kind=ExitKind.INTERRUPTED, step=4, at=1005.1)
    state, commands = machine.step(state, RunReturned(0, left), 1005.1, plan)
    yield "re_forming", state, commands


def _info(index: int) -> WorkerInfo:
    return WorkerInfo(
        version=WIRE_VERSION,
        worker_id=f"shoal/j1/1/worker-{index}",
        node_id=f"n{index}",
        node_ip="10.0.0.1",
        pid=4000 + index,
        store_port=5000 + index,
        device="cpu",
        snapshot_port=7000 + index,
    )


def _reports() -> SupervisorReports:
    return SupervisorReports(
        attempt=1,
        version=WIRE_VERSION,
        seq=9,
        events=(PendingEvent(at=1.0, type="worker.started", data={"pid": 7}),),
        incidents=(
            IncidentView(
                id=1,
                cause=IncidentCause.NODE_DIED,
                witness="run call",
                ranks=(1,),
                worker_ids=("b",),
                generation=1,
                at=1.0,
                from_workers=2,
                steps_lost=1,
            ),  # fmt: skip - one incident, not nine lines
        ),
        checkpoints=(CheckpointView(step=4, url="/checkpoints/j1/x", state="committed", attempt=1, generation=1),),
        series=(
            SeriesPoint(
                step=4,
                at=1.0,
                loss=2.5,
                grad_norm=1.0,
                lr=1e-4,
                tokens_per_s=1e6,
                step_s=0.1,
                world_size=2,
                generation=1,
            ),
        ),
        logs=(PendingLog(at=1.0, rank=0, worker_id="a", stream="stdout", text="hello"),),
        suspects=(SuspectedNode(at=1.0, node_id="n1", reason="it hung"),),
        status=JobStatus(
            state=JobState.RUNNING,
            step=4,
            conditions=(Condition(type="WorkersReady", status=True, reason="r", message="m", since=1.0),),
        ),
        workers=(
            WorkerView(
                worker_id="a",
                rank=0,
                state="training",
                node_id="n0",
                node_ip="10.0.0.1",
                pid=7,
                generation=1,
                phase="forward",
                step=4,
            ),  # fmt: skip - one worker, not nine lines
        ),
        end=AttemptEnd(reason=EndReason.FINISHED, message="done", step=12),
    )


def _document(value: BaseModel) -> dict[str, Any]:
    document = {"type": _path(type(value)), "json": json.loads(value.model_dump_json())}
    if not isinstance(value, JournalEntry):  # stored as JSON only
        document["pickle"] = base64.b64encode(pickle.dumps(value, protocol=5)).decode()
    return document


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _hash(schema: Any) -> str:
    return hashlib.sha256(json.dumps(_without_words(schema), sort_keys=True).encode()).hexdigest()[:16]


def _without_words(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_words(value) for key, value in schema.items() if key not in ("description", "title")}
    return [_without_words(one) for one in schema] if isinstance(schema, list) else schema


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
