"""Every query of every dashboard returns data once its metrics have series, also those that the demo has not.

The service shows a job with everything that a job can have, a webhook and a backup; promtool loads what it exposes.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import BOARDS
from doubles.fake_cluster_source import FakeClusterSource
from kit.island_rounds import close
from kit.requirements import require
from kit.scrapes import scrape
from kit.views import worker_view
from shoal_service.core.goodput import Goodput
from shoal_service.core.node_loss import NodeLossBound, Protection
from shoal_service.fleet_views import NodeView
from shoal_service.store import Lease, Store
from shoal_service.store.backup import mark_backup
from shoal_service.telemetry.tallies import DeliveryOutcome, Limit, RequestMetrics, WebhookTallies
from shoal_service.views import CheckpointView, Condition, ConditionType
from shoal_workers.contract.messages import StepPart, WorkerUse

_OF_PROMETHEUS = {("scrape_duration_seconds", frozenset[tuple[str, str]]()): 0.1}
"""Made by Prometheus itself."""


@pytest.fixture
def job_id(store: Store, lease: Lease, submit: Callable[..., str], begin: Callable[..., Any], points: Any) -> str:
    """An island on GPUs with a task's own metrics, a gradient log, a bound on the loss of a node, and a checkpoint."""
    job_id = submit(islands={"num": 1, "index": 0})
    close(store, lease.epoch, job_id, 0, [0])
    use = WorkerUse(
        at=1.0,
        cpu_cores=1.0,
        resident_bytes=1,
        shm_bytes=2,
        shm_free_bytes=1,
        disk_bytes=2,
        disk_free_bytes=1,
        gpu_bytes=2,
        gpu_free_bytes=1,
        gpu_busy=0.5,
        gpu_celsius=60.0,
        gpu_watts=300.0,
        received_bytes_s=1.0,
        sent_bytes_s=1.0,
        read_bytes_s=1.0,
        written_bytes_s=1.0,
        phases={StepPart.FORWARD: 0.9, StepPart.COMMUNICATION: 0.1},
    )
    worker = worker_view(use=use)
    # Whether a rank waits for others is known of those without a GPU.
    without_gpu = worker.model_copy(
        update={"worker_id": "w-1", "rank": 1, "use": use.model_copy(update={"gpu_bytes": 0, "gpu_busy": None})}
    )
    attempt = begin(job_id)
    attempt.report(series=points({1: 1.0}))
    attempt.report(
        status_workers=1,
        status_step=1,
        status_total_steps=2,
        status_loss=1.0,
        status_val_loss=1.0,
        status_metrics={"accuracy": 0.5},
        status_tokens_per_s=1.0,
        status_step_s=1.0,
        status_step_at=1.0,
        status_grad_norm=1.0,
        status_lr=0.1,
        status_communication_share=0.1,
        status_data_share=0.1,
        status_layout="fsdp1",
        status_snapshot_share=0.1,
        status_snapshot_every_steps=1,
        status_checkpoint_step=1,
        status_node_loss=NodeLossBound(protection=Protection.COPIES, at_most=1, now=0),
        status_conditions=tuple(
            Condition(type=type_, status=True, reason="r", message="m", since=1.0) for type_ in ConditionType
        ),
        status_goodput=Goodput(at=20.0, seconds={"productive": 30.0}, recovering={"hung": 3.0}, total=33.0, ratio=0.9),
        checkpoints=(
            CheckpointView(
                step=1, url="/c", state="committed", attempt=1, generation=1, bytes=1, seconds=1.0, committed_at=1.0
            ),
        ),
        workers=(worker, without_gpu),
    )
    return job_id


def test_every_query_returns_data(store: Store, job_id: str, tmp_path: Path) -> None:
    promtool = require("prometheus", "promtool")
    mark_backup(tmp_path)
    webhooks, requests = WebhookTallies(["ops"]), RequestMetrics()
    webhooks.seconds.observe(0.1, "ops")
    webhooks.outcomes.add("ops", DeliveryOutcome.DELIVERED)
    requests.observe("GET", "/v1/jobs", 200, 0.1)
    requests.refusals.add(Limit.REQUESTS)
    node = NodeView(node_id="n1", ip="127.0.0.1", alive=True, cpus=4, gpus=1, memory_gib=8)
    samples = scrape(store, requests=requests, cluster=FakeClusterSource(node), state_dir=tmp_path, webhooks=webhooks)
    queries = {
        query.expr.replace("$__rate_interval", "5m").replace("$job", job_id)
        for board in BOARDS.values()
        for panels in board.rows.values()
        for panel in panels
        for query in panel.queries
    }
    tests = {
        "interval": "1m",
        "input_series": [_series(key, value) for key, value in (samples | _OF_PROMETHEUS).items()],
        "promql_expr_test": [
            {"expr": f"count({query}) > bool 0", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}
            for query in sorted(queries)
        ],
    }
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"tests": [tests]}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _series(key: tuple[str, frozenset[tuple[str, str]]], value: float) -> dict[str, str]:
    """A counter that rises, so that a rate has something to show; everything else stands still."""
    name, labels = key
    text = ", ".join(f'{label}="{value}"' for label, value in sorted([*labels, ("instance", "a")]))
    growth = "0+1x10" if name.endswith(("_total", "_bucket", "_count", "_sum")) else f"{value}x10"
    return {"series": f"{name}{{{text}}}", "values": growth}
