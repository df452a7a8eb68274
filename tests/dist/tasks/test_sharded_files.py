"""A task over shards that another library has written: the same losses from each form of them, and with readers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kit.shards import samples
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import ExitKind

SPEC: dict[str, Any] = {
    "task": "sharded_tasks:Numbers",
    "batch": {"global_size": 4, "micro_size": 2},
    "optimizer": {"lr": 0.05},
    "schedule": {"warmup_steps": 0},
    "stop": {"steps": 5},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 3, "every_steps": 5},
    "deterministic": True,
    "seed": 2,
}


def _losses(make_job: Any, root: str, shards: Path, **changes: Any) -> dict[int, float]:
    job = make_job(root, **{**SPEC, **changes, "data": {"shards": str(shards), **changes.get("data", {})}})
    workers = job.workers(2)
    ends = job.run(workers, layout=fully_sharded(2))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, [end.error for end in ends]
    found: dict[int, float] = job.losses(workers)
    return found


def test_readers_and_the_compression_of_shards_change_no_loss(make_job: Any) -> None:
    """`decode` is a function of the task's module, or its name in the spec."""
    plain = _losses(make_job, "plain", samples.FILES / "mds-plain")
    ahead = {"batch": {**SPEC["batch"], "num_workers": 2}, "data": {"decode": "sharded_tasks:decode"}}
    assert _losses(make_job, "ahead", samples.FILES / "mds-zstd", **ahead) == plain
    assert len(plain) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_shard_ends_the_job_with_its_file_and_the_sample(
    make_job: Any, tmp_path: Path, num_workers: int
) -> None:
    copied = Path(shutil.copytree(samples.FILES / "mds-plain", tmp_path / "mds"))
    last = max(copied.glob("*.mds"))
    whole = bytearray(last.read_bytes())
    whole[-40:-36] = b"\xff\xff\xff\xff"
    at = whole.index(b'"tree"')  # the columns of the header are as they were
    assert at > 0
    end = int.from_bytes(whole[4 * (int.from_bytes(whole[:4], "little") + 1) :][:4], "little")
    start = int.from_bytes(whole[4 * int.from_bytes(whole[:4], "little") :][:4], "little")
    whole[start:end] = bytes(end - start)
    last.write_bytes(whole)
    job = make_job(**{**SPEC, "data": {"shards": str(copied)}, "batch": {**SPEC["batch"], "num_workers": num_workers}})
    [worker] = job.workers(1)
    [ended] = job.run([worker])
    assert ended.kind is ExitKind.USER_ERROR
    assert ended.error is not None
    assert f"{last}, sample " in ended.error.message
    assert "cannot be read as an MDS shard" in ended.error.message
    assert "Raised by sample 4 of 5." in ended.error.traceback
