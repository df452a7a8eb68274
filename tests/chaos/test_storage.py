"""The checkpoint storage fails under a job: it fills up, or gives back other bytes than were written."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.worlds.tiny_jobs import holds
from shoal_service.views import Condition, JobView


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
