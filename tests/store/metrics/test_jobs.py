import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from kit.requirements import require
from kit.scrapes import NOW, exposition_of, scrape, value_of
from kit.views import worker_view
from shoal_service.core.desired import Desired
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.goodput import Goodput
from shoal_service.core.node_loss import NodeLossBound, Protection
from shoal_service.store import Store, checkpoint_rows, submissions
from shoal_service.store.metrics_snapshot import GRACE_S
from shoal_service.views import CheckpointView, WorkerView
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import WorkerUse

Submit = Callable[..., str]
Begin = Callable[..., Any]
Points = Callable[[dict[int, float]], tuple[SeriesPoint, ...]]
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def _checkpoint(step: int, state: str = "committed", **fields: Any) -> CheckpointView:
    known = {"bytes": step * 10, "seconds": 2.0, "committed_at": 1.0 + step} if state == "committed" else {}
    return CheckpointView(step=step, url="/c", state=state, attempt=1, generation=1, **{**known, **fields})


def test_promtool_accepts_what_is_exposed(store: Store, submit: Submit, begin: Begin, points: Points) -> None:
    promtool = require("prometheus", "promtool")
    attempt = begin(submit())
    use = {"at": 1.0, "cpu_cores": 1.0, "resident_bytes": 1, "shm_bytes": 2, "disk_bytes": 2, "gpu_bytes": 2}
    attempt.report(series=points({1: 0.5}), checkpoints=(_checkpoint(10),), workers=(_worker(0, "n1", **use),))
    body, _ = exposition_of(store).render("")
    checked = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def _worker(rank: int | None, node: str, **use: Any) -> WorkerView:
    return worker_view(rank, node_id=node, use=WorkerUse(**use) if use else None)


def test_the_series_of_a_running_job_have_the_values_of_its_status(store: Store, submit: Submit, begin: Begin) -> None:
    job_id = submit(elasticity={"max_workers": 4}, priority=7)
    queued = submit()
    attempt = begin(job_id, workers=4)
    attempt.report(
        status_workers=3,
        status_step=30,
        status_total_steps=100,
        status_loss=1.5,
        status_val_loss=1.75,
        status_tokens_per_s=99.0,
        status_step_s=0.5,
        status_step_at=8.5,
        status_grad_norm=0.25,
        status_lr=0.001,
        status_communication_share=0.125,
        status_data_share=0.0625,
        status_steps_lost=2,
        status_layout="fsdp3",
        checkpoints=(_checkpoint(10), _checkpoint(20), _checkpoint(30, "damaged")),
        status_snapshot_share=0.004,
        status_snapshot_every_steps=2,
        status_node_loss=NodeLossBound(protection=Protection.COPIES, at_most=1, now=0),
        status_goodput=Goodput(
            at=9.0, seconds={"productive": 30.0, "queued": 10.0}, recovering={"hung": 3.0}, total=40.0, ratio=0.75
        ),
    )
    samples = scrape(store)
    assert value_of(samples, "shoal_jobs", state="RUNNING") == 1
    assert value_of(samples, "shoal_jobs", state="QUEUED") == 1
    assert value_of(samples, "shoal_jobs", state="FAILED") == 0
    batch = store.get_job(job_id).spec.batch.global_size
    expected = {
        "shoal_job_workers": 3,
        "shoal_job_desired_workers": 4,
        "shoal_job_max_workers": 4,
        "shoal_job_attempts_total": 1,
        "shoal_job_start_timestamp_seconds": 5,
        "shoal_job_report_timestamp_seconds": 9,
        "shoal_job_step": 30,
        "shoal_job_total_steps": 100,
        "shoal_job_step_timestamp_seconds": 8.5,
        "shoal_job_loss": 1.5,
        "shoal_job_validation_loss": 1.75,
        "shoal_job_gradient_norm": 0.25,
        "shoal_job_learning_rate": 0.001,
        "shoal_job_tokens_per_second": 99,
        "shoal_job_samples_per_second": batch / 0.5,
        "shoal_job_communication_ratio": 0.125,
        "shoal_job_data_wait_ratio": 0.0625,
        "shoal_job_steps_lost_total": 2,
        "shoal_checkpoint_bytes": 200,
        "shoal_job_checkpoint_timestamp_seconds": 21,
        "shoal_job_checkpoint_last_seconds": 2,
        "shoal_job_goodput_ratio": 0.75,
        "shoal_job_snapshot_share": 0.004,
        "shoal_job_snapshot_every_steps": 2,
        "shoal_job_node_loss_steps": 0,
        "shoal_job_node_loss_max_steps": 1,
    }
    for name, value in expected.items():
        assert value_of(samples, name, job_id=job_id) == value, name
        assert value_of(samples, name, job_id=queued) is None
    assert value_of(samples, "shoal_job_goodput_seconds", job_id=job_id, category="productive") == 30
    assert value_of(samples, "shoal_job_goodput_seconds", job_id=job_id, category="queued") == 10
    assert value_of(samples, "shoal_job_recovering_seconds", job_id=job_id, cause="hung") == 3
    info = {"name": "fish", "layout": "fsdp3", "priority": "7", "project": "default"}
    assert value_of(samples, "shoal_job_info", job_id=job_id, **info) == 1
    assert value_of(samples, "shoal_job_state", job_id=job_id, state="RUNNING") == 1
    assert value_of(samples, "shoal_job_state", job_id=job_id, state="RECOVERING") == 0
    utilisation = value_of(samples, "shoal_job_mfu_ratio", job_id=job_id)
    assert utilisation is not None and 0 < utilisation < 1


def test_metrics_of_a_task_are_one_family_with_name_and_split(store: Store, submit: Submit, begin: Begin) -> None:
    job_id, plain = submit(), submit()
    begin(job_id).report(status_metrics={"acc/top-1": 0.25}, status_val_metrics={"acc/top-1": 0.125, "f1": 0.5})
    begin(plain).report(status_loss=1.5)
    samples = scrape(store)
    name = "shoal_job_task_metric"
    assert value_of(samples, name, job_id=job_id, metric="acc/top-1", split="train") == 0.25
    assert value_of(samples, name, job_id=job_id, metric="acc/top-1", split="validation") == 0.125
    assert value_of(samples, name, job_id=job_id, metric="f1", split="validation") == 0.5
    assert sum(found == name for found, _ in samples) == 3


def test_the_final_values_of_a_job_stay_for_some_scrapes_and_then_vanish(
    store: Store, job_id: str, attempt: Any
) -> None:
    attempt.report(status_step=30, status_loss=1.5, checkpoints=(_checkpoint(10),))
    attempt.report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=30), now=NOW, status_loss=1.5)
    last = scrape(store, clock=lambda: NOW + GRACE_S - 1)
    assert value_of(last, "shoal_job_loss", job_id=job_id) == 1.5
    assert value_of(last, "shoal_job_state", job_id=job_id, state="SUCCEEDED") == 1
    after = scrape(store, clock=lambda: NOW + GRACE_S + 1)
    assert not any(("job_id", job_id) in labels for _, labels in after)
    assert value_of(after, "shoal_checkpoint_seconds_count") == 1


def test_a_deleted_or_damaged_checkpoint_stays_in_the_counts(store: Store, job_id: str, attempt: Any) -> None:
    attempt.report(checkpoints=(_checkpoint(10), _checkpoint(20)))
    before = scrape(store)
    attempt.report(checkpoints=(_checkpoint(10, "deleted"), _checkpoint(20, "damaged", message="crc")))
    after = scrape(store)
    for name in ("shoal_checkpoint_seconds_count", "shoal_checkpoint_seconds_sum"):
        assert value_of(before, name) == value_of(after, name) != 0
    assert value_of(after, "shoal_checkpoint_bytes", job_id=job_id) is None, "no checkpoint can be restored"
    damaged = store.reading(checkpoint_rows.read_checkpoints)(job_id)[-1]
    assert (damaged.state, damaged.bytes, damaged.committed_at, damaged.message) == ("damaged", 200, 21.0, "crc")


def test_step_times_are_counted_over_all_attempts_each_step_once(
    store: Store, begin: Begin, points: Points, job_id: str, attempt: Any
) -> None:
    attempt.report(series=points({1: 0.5, 2: 0.4}))  # one second each
    validated = points({2: 0.4})[0].model_copy(update={"val_loss": 0.3})
    attempt.report(series=(validated,))
    attempt.repeat(series=points({2: 0.4}))
    attempt.report(end=AttemptEnd(reason=EndReason.SUPERVISOR_LOST, message="", step=2))
    begin(job_id).report(series=points({2: 0.4, 3: 0.3}))
    samples = scrape(store)
    name = "shoal_job_step_seconds"
    assert value_of(samples, f"{name}_count", job_id=job_id) == value_of(samples, f"{name}_sum", job_id=job_id) == 4
    assert value_of(samples, f"{name}_bucket", job_id=job_id, le="0.3") == 0
    assert value_of(samples, f"{name}_bucket", job_id=job_id, le="1.0") == 4


def test_workers_show_what_they_use_and_nodes_the_newest_measurement(store: Store, begin: Begin, job_id: str) -> None:
    fresh = {"at": 3.0, "shm_bytes": 100, "shm_free_bytes": 40, "disk_bytes": 50, "disk_free_bytes": 5}
    begin(job_id).report(
        workers=(
            _worker(0, "n1", at=2.0, cpu_cores=0.5, resident_bytes=7, shm_bytes=100, shm_free_bytes=90),
            _worker(1, "n1", gpu_bytes=80, gpu_free_bytes=20, gpu_busy=0.25, **fresh),
            _worker(None, "n2"),
        )
    )
    samples = scrape(store)
    assert value_of(samples, "shoal_worker_info", job_id=job_id, rank="1", node_id="n1") == 1
    assert value_of(samples, "shoal_worker_cpu_cores", job_id=job_id, rank="0") == 0.5
    assert value_of(samples, "shoal_worker_cpu_cores", job_id=job_id, rank="1") is None
    assert value_of(samples, "shoal_worker_resident_bytes", job_id=job_id, rank="0") == 7
    assert value_of(samples, "shoal_worker_gpu_used_bytes", job_id=job_id, rank="0") is None
    assert value_of(samples, "shoal_worker_gpu_used_bytes", job_id=job_id, rank="1") == 60
    assert value_of(samples, "shoal_worker_gpu_busy_ratio", job_id=job_id, rank="1") == 0.25
    assert value_of(samples, "shoal_node_shm_free_bytes", node_id="n1") == 40
    assert value_of(samples, "shoal_node_disk_free_bytes", node_id="n1") == 5
    assert value_of(samples, "shoal_node_shm_bytes", node_id="n2") is None


@pytest.mark.parametrize("desired", [Desired.PAUSE, Desired.CANCEL])
def test_a_job_without_an_attempt_has_no_series(store: Store, desired: Desired, job_id: str) -> None:
    store.writing(submissions.request)(job_id, desired, now=NOW)
    assert not any(("job_id", job_id) in labels for _, labels in scrape(store))
