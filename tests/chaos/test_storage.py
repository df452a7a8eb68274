"""The checkpoint storage fails under a job: it fills up, or gives back other bytes than were written."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_service.views import Condition, JobView
from shoal_workers.contract.job import JobState


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", str(mount_point)], check=True)


@pytest.mark.matrix
def test_a_full_disk_stops_checkpoints_but_not_training(submit, small_disk: Path) -> None:
    run = submit(checkpoint={"url": str(small_disk), "every_steps": 2}, strikes=holds(5, 10))
    run.wait_at("step-5-0")
    run.wait_for_event("checkpoint.committed", 2)
    assert _checkpoint_healthy(run.now()).status
    padding = small_disk / "padding"
    _fill(padding)
    run.release("step-5-0")

    run.wait_for_event("checkpoint.failed", 2)
    run.wait_at("step-10-0")
    condition = _checkpoint_healthy(run.now())
    assert not condition.status and condition.reason == "SaveFailed"
    assert "No space left" in condition.message
    assert run.now().status.checkpoint_step == 4
    padding.unlink()
    run.release("step-10-0")

    job = run.finish()
    assert _checkpoint_healthy(job).status
    assert job.status.checkpoint_step == 20
    assert run.world_sizes() == [2], "a save that fails does not disturb the group"
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_damaged_checkpoint_is_not_loaded_and_the_one_before_it_is(submit, client: Client) -> None:
    run = submit(min_workers=2, strikes=holds(10))
    run.wait_at("step-10-0")
    client.pause(run.id)
    run.wait_for_event("generation.switching")
    run.release("step-10-0")
    run.wait_for(JobState.PAUSED)
    newest = max((c for c in client.checkpoints(run.id) if c.state == "committed"), key=lambda c: c.step)
    assert newest.step == 10
    _flip_a_byte(Path(newest.url) / "shard-00001.bin")

    client.resume(run.id)
    run.finish()
    [damaged] = run.events("checkpoint.damaged")
    assert damaged.data["name"] == Path(newest.url).name
    assert "shard-00001.bin" in damaged.data["message"]
    [fallback] = run.events("checkpoint.fallback")
    assert fallback.data["to"] == "step-000000000008-a1-g1"
    assert run.events("generation.formed")[-1].data["start_step"] == 8
    shown = {Path(c.url).name: c.state for c in client.checkpoints(run.id)}
    assert shown[Path(newest.url).name] in ("damaged", "deleted")
    run.assert_undisturbed_losses()


def _checkpoint_healthy(job: JobView) -> Condition:
    [condition] = [c for c in job.status.conditions if c.type == "CheckpointHealthy"]
    return condition


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
