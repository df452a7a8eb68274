"""The process of a metrics hook: each step once, in order, whatever it raises; and a worker never waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from shoal_workers.contract.messages import MetricPoint, MetricsBatch, MetricsProgress
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.process.secrets import Mask
from shoal_workers.metrics_hook.process import HookProcess, job_of

_PATIENCE_S = 240.0
"""For a new process that imports a tracker."""
SPEC = JobSpec.model_validate({"task": "m:T", "stop": {"steps": 9}, "name": "digits", "labels": {"lr": "3e-4"}})
TASKS = str(Path(__file__).parents[2] / "kit" / "tasks")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.syspath_prepend(TASKS)
    return tmp_path / "record"


def points(*steps: int, first: int = 1, names: tuple[str, ...] = ("loss",)) -> tuple[MetricPoint, ...]:
    return tuple(
        MetricPoint(seq=first + i, step=step, at=1_790_000_000.0 + step, values=dict.fromkeys(names, step / 2))
        for i, step in enumerate(steps)
    )


def entries(record: Path, kind: str) -> list[object]:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


def until(hook: HookProcess, batch: MetricsBatch, holds: Callable[[MetricsProgress], bool], life: int = 1) -> None:
    """As a supervisor does it: the same batch again, until its progress is as it should be."""
    deadline = time.monotonic() + _PATIENCE_S
    while not holds(progress := hook.forward(batch, life)):
        assert time.monotonic() < deadline, progress
        time.sleep(0.02)


def hook_of(name: str, said: list[str], **more: object) -> HookProcess:
    return HookProcess(f"recording_hooks:{name}", job_of("job-1", SPEC), said.append, **more)


def test_each_step_is_logged_once_and_the_end_after_the_last(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_KEY", "k-123456789")
    said: list[str] = []
    mask = Mask()
    mask.add({"TRACKER_KEY": "k-123456789"})
    hook = hook_of("Recording", said, mask=mask)
    assert hook.forward(MetricsBatch(points=points(1, 2)), 1) == MetricsProgress(), "it returns before the hook runs"
    until(hook, MetricsBatch(points=points(1, 2, 3)), lambda progress: progress.logged == 3)
    # a recovery repeats steps 2 and 3; the validation of step 3 comes after it
    repeated = (*points(2, 3, first=4), *points(3, first=6, names=("loss", "val_loss")), *points(4, first=7))
    until(hook, MetricsBatch(points=repeated, end="succeeded"), lambda progress: progress.has_ended)
    hook.close()
    assert entries(record, "log") == [[1, ["loss"]], [2, ["loss"]], [3, ["loss"]], [3, ["val_loss"]], [4, ["loss"]]]
    assert entries(record, "end") == ["succeeded"] and entries(record, "start") == ["job-1"]
    assert said[0] == "step 1 with [secret TRACKER_KEY]", "the job's environment, and masked in its log"


def test_a_hook_that_raises_is_started_again_and_logs_what_is_missing(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKER_KEY", "k-123456789")
    mask = Mask()
    mask.add({"TRACKER_KEY": "k-123456789"})
    said: list[str] = []
    hook = hook_of("FailsOnce", said, mask=mask)
    batch = MetricsBatch(points=points(1, 2, 3, 4))
    refused = "ConnectionError: the tracker refuses [secret TRACKER_KEY]"
    until(hook, batch, lambda progress: progress.error == refused)
    until(hook, batch, lambda progress: progress == MetricsProgress(logged=4))
    hook.close()
    assert entries(record, "log") == [[step, ["loss"]] for step in (1, 2, 3, 4)]
    assert len(entries(record, "start")) == 2
    assert any("Traceback" in line for line in said), "the log of the job has its traceback"


def test_a_hook_that_hangs_or_leaves_costs_its_worker_nothing(record: Path) -> None:
    batch = MetricsBatch(points=points(1))
    for name, error in (
        ("Hangs", "it did not answer within 3 s"),
        ("Leaves", "SystemExit: 7"),
        ("NotThere", "AttributeError: module 'recording_hooks' has no attribute 'NotThere'"),
    ):
        hook = hook_of(name, [], answer_s=3.0 if name == "Hangs" else 60.0)
        assert hook.forward(batch, 1) == MetricsProgress(), "it returns before the hook runs"
        until(hook, batch, lambda progress, error=error: progress.error == error)
        hook.close()


def test_a_new_worker_and_a_new_supervisor_continue_where_the_tracker_is(record: Path) -> None:
    first = hook_of("Recording", [])
    until(first, MetricsBatch(points=points(1, 2, 3)), lambda progress: progress.logged == 3)
    # the supervisor is restarted: it counts anew, and sends what it has no answer for
    until(first, MetricsBatch(points=points(3, 4)), lambda progress: progress.logged == 2, life=2)
    first.close()  # the worker dies, and its process with it
    second = hook_of("Recording", [])
    until(second, MetricsBatch(points=points(3, 4, 5)), lambda progress: progress.logged == 3, life=2)
    second.close()
    assert entries(record, "log") == [[step, ["loss"]] for step in (1, 2, 3, 4, 5)]


def test_the_process_ends_with_its_worker_also_while_the_hook_hangs(record: Path) -> None:
    """A worker that is killed leaves a connection that ends."""
    pipe, child_end = Pipe()
    number = child_end.fileno()
    program = [sys.executable, "-m", "shoal_workers.metrics_hook.program", "recording_hooks:Hangs", str(number)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(program, pass_fds=(number,), env=environment)
    child_end.close()
    for request in ({"job": job_of("job-1", SPEC).model_dump()}, {"points": [points(1)[0].model_dump()]}):
        pipe.send_bytes(json.dumps(request).encode())
    assert pipe.recv_bytes() == b'{"started": true}'
    pipe.close()
    assert process.wait(30) == 0


@pytest.mark.slow
def test_mlflow_gets_one_run_for_a_job_that_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path = "shoal_workers.metrics_hook:mlflow"
    first = HookProcess(path, job_of("job-1", SPEC), print)
    until(first, MetricsBatch(points=points(1, 2, 3)), lambda progress: progress.logged == 3)
    first.close()
    second = HookProcess(path, job_of("job-1", SPEC), print)
    rest = (*points(2, 3), *points(3, 4, first=3, names=("loss", "val_loss")))
    until(second, MetricsBatch(points=rest, end="succeeded"), lambda progress: progress.has_ended)
    second.close()
    [metrics] = tmp_path.glob("mlruns/*/*/metrics")
    for name, steps in (("loss", ["1", "2", "3", "4"]), ("val_loss", ["3", "4"])):
        lines = (metrics / name).read_text().splitlines()
        assert [line.split()[2] for line in lines] == steps, name
    assert "job-1" in (metrics.parent / "tags" / "shoal.job_id").read_text()
    assert (metrics.parent / "params" / "optimizer.lr").read_text() == "0.0003"
    assert "status: 3" in (metrics.parent / "meta.yaml").read_text(), "FINISHED"
