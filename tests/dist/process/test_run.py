"""run.py under torchrun: the same spec without Ray, resumed from what it committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python
from shoal_workers.checkpoint.commit import newest_committed
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel
from shoal_workers.libc_tunables import choose_tunables
from shoal_workers.standalone import layout_for

SPEC: dict[str, Any] = {
    "task": "tiny_tasks:Counting",
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": 4},
    "validation": {"samples": 5},
    "elasticity": {"max_workers": 2},
}


def launch(directory: Path, *launcher: str, spec: dict[str, Any] = SPEC) -> tuple[dict[int, float], dict[str, Any]]:
    """Losses by step, and the final line."""
    spec_path = directory / "spec.yaml"
    spec_path.write_text(json.dumps(spec))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "kit" / "tasks")}
    command = [
        warm_python(),
        "-m",
        *launcher,
        "shoal_workers.run",
        str(spec_path),
        "--checkpoint-dir",
        str(directory / "ck"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    return {int(w[1]): float(w[3]) for w in words}, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_torchrun_trains_a_sharded_loop_as_one_process_does_and_warns_of_nothing(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "examples" / "gallery" / "fsdp2"
    spec = {
        "name": "sharded",
        "loop": {"file": "train.py", "args": ["8"]},
        "code": {"working_dir": str(folder)},
        "parallelism": {"dp_shard": "auto"},
        "elasticity": {"max_workers": 2},
    }
    found = []
    for number in ("1", "2"):
        directory = tmp_path / number
        directory.mkdir()
        found.append(
            launch(directory, "torch.distributed.run", "--standalone", "--nproc-per-node", number, "-m", spec=spec)
        )
    (alone, _), (sharded, end) = found
    assert sharded == pytest.approx(alone, abs=2e-6) and len(alone) == 8
    assert (end["end"], end["steps"]) == ("finished", 8)


@pytest.mark.matrix
def test_torchrun_trains_a_spec_and_a_single_process_resumes_it(tmp_path: Path, reference: Any) -> None:
    plain = reference(6, **SPEC)
    losses, end = launch(tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    assert losses == pytest.approx(plain, abs=1e-5)
    assert (end["end"], end["steps"], end["checkpoints"]) == ("finished", 6, 2)
    assert end["tokens_per_s"] > 0
    newest = newest_committed(str(tmp_path / "ck"))
    assert newest is not None and "step-000000000006-a1" in newest
    (Path(newest) / "COMMIT.json").unlink()
    again, end_again = launch(tmp_path)
    assert again == pytest.approx({step: plain[step] for step in (5, 6)}, abs=1e-5)
    assert end_again["val_loss"] == pytest.approx(end["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_another_spec_does_not_continue_unnoticed_from_what_it_finds(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert (
        "begins; its checkpoints are in job-checkpoints\n" in first.stdout and (tmp_path / "job-checkpoints").is_dir()
    )
    changed = {**SPEC, "optimizer": {"lr": 0.01}, "stop": {"steps": 8}}
    refused = run(tmp_path, spec=changed)
    assert refused.returncode == 1 and "step " not in refused.stdout
    assert "another spec: optimizer.lr, stop.steps differ. To continue from" in refused.stderr
    again = run(tmp_path, "--changed-spec", spec=changed)
    assert "continues from job-checkpoints/step-000000000006-a1-g1\n" in again.stdout
    assert [line.split()[1] for line in again.stdout.splitlines() if line.startswith("step ")] == ["7", "8"]


@pytest.mark.slow
def test_a_task_may_change_the_working_directory(tmp_path: Path) -> None:
    done = run(tmp_path, spec={**SPEC, "task": "mistaken_tasks:OwnSettings", "validation": {"samples": 0}})
    assert done.returncode == 0, done.stderr
    assert newest_committed(str(tmp_path / "job-checkpoints")) is not None


def test_a_task_runs_on_another_thread_than_the_main_one_as_in_the_service(tmp_path: Path) -> None:
    done = run(tmp_path, spec={**SPEC, "task": "mistaken_tasks:OwnHandler"})
    assert done.returncode == 1 and "signal only works in main thread" in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["end"] == "user_error"


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_it_starts_with_the_settings_of_libraries_that_workers_of_the_service_have(
    tmp_path: Path, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    done = run(tmp_path, spec={**SPEC, "task": "mistaken_tasks:Tunables"}, python=sys.executable)
    expected = own or choose_tunables({})["GLIBC_TUNABLES"]
    assert f"started with {expected}" in done.stderr, done.stderr


def run(
    directory: Path, *options: str, spec: dict[str, Any] = SPEC, python: str | None = None
) -> subprocess.CompletedProcess[str]:
    """In one process without torchrun, in that directory."""
    (directory / "spec.yaml").write_text(json.dumps(spec))
    sources = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2] / "kit" / "tasks")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sources}
    command = [python or warm_python(), "-m", "shoal_workers.run", "spec.yaml", *options]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_torchrun_trains_in_the_layout_that_the_spec_fixes(tmp_path: Path, text: str, plain_run: Any) -> None:
    spec = {**_lm(text), "parallelism": {"tp": 2}}
    losses, end = launch(tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", spec=spec)
    assert losses == pytest.approx(plain_run(_lm(text)).losses, abs=1e-5)
    assert end["end"] == "finished"


def test_the_layout_is_that_of_the_fixed_degrees(text: str) -> None:
    fixed = {"pp": 2, "tp": 2, "shard": "optimizer", "schedule": "1f1b"}
    spec = parse_spec({**_lm(text), "elasticity": {"max_workers": 8}, "parallelism": fixed})
    expected = Layout(pp=2, tp=2, dp_shard=2, shard=ShardLevel.OPTIMIZER, schedule=Schedule.ONE_F_ONE_B, stages=(1, 1))
    assert layout_for(spec, 8) == expected
    assert layout_for(parse_spec(_lm(text)), 3) == Layout(dp_shard=3)


def test_a_world_size_that_the_degrees_do_not_fit_is_refused(text: str) -> None:
    spec = parse_spec({**_lm(text), "elasticity": {"max_workers": 8}, "parallelism": {"pp": 2, "tp": 2}})
    with pytest.raises(SystemExit, match="needs a multiple of 4 ranks, and torchrun started 6"):
        layout_for(spec, 6)


def _lm(text: str) -> dict[str, Any]:
    return {
        "task": LM_TASK,
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "seq_len": 32},
        "data": {"paths": [text], "cache_dir": f"{text}-cache", "validation_fraction": 0.3},
        "batch": {"global_size": 8, "micro_size": 2},
        "stop": {"steps": 4},
        "validation": {"samples": 2},
        "elasticity": {"max_workers": 2},
    }
