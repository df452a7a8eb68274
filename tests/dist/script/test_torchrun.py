"""The same DDP script under torchrun and on Shoal's workers: the same environment, the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.processes.script_bench import SCRIPTS, ScriptBench
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

Bench = Callable[..., ScriptBench]
STEPS = 8
TEXT = (SCRIPTS / "train_ddp.py").read_text(encoding="utf-8")
_PREFIXES = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "TORCH_NCCL_")
_OWN_VALUES = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE")
}
_OF_THE_AGENT = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun sets for itself, and its workers inherit."""


@dataclass(frozen=True)
class Run:
    losses: dict[int, float]
    environments: list[dict[str, str]]


def _read(out: Path) -> Run:
    lines = [line.split() for line in out.read_text(encoding="utf-8").splitlines()]
    environments = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]
    return Run({int(step): float(loss) for step, loss in lines}, environments)


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("torchrun")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*program, SCRIPTS / "train_ddp.py", str(STEPS), folder / "out"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return _read(folder / "out")


def test_a_script_trains_as_under_torchrun(bench: Bench, torchrun: Run, tmp_path: Path) -> None:
    runners = bench(TEXT, 2, script={"args": [str(STEPS), str(tmp_path / "out")]})
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED] * 2
    own = _read(tmp_path / "out")
    assert own.losses == torchrun.losses, "bit for bit"
    assert {one.step: one.loss for one in runners.reports(StepReport)} == torchrun.losses
    for found, expected in zip(own.environments, torchrun.environments, strict=True):
        names = {name for name in expected if name.startswith(_PREFIXES)} - _OF_THE_AGENT
        assert names <= found.keys()
        same = names - _OWN_VALUES
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def test_a_script_goes_on_from_its_checkpoint_with_fewer_workers_and_with_more(
    bench: Bench, torchrun: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    runners = bench(TEXT, 2, script={"args": [str(1_000_000), str(out)], "grace_s": 60})
    for number, world_size in enumerate((2, 1, 2), start=1):
        runners.start(world_size)
        poll = runners.outboxes[0].poll
        seq, steps = 0, 0
        while steps < 3:
            found = poll(seq, 60.0, runners.runners[0].progress, acknowledged=0)
            seq = found.seq
            steps += sum(isinstance(one, StepReport) and one.generation == number for one in found.reports)
        kinds = {end.kind for end in runners.request_yield()}
        assert kinds == {ExitKind.YIELDED}
    losses = [line.split() for line in out.read_text(encoding="utf-8").splitlines()]
    assert [int(step) for step, _ in losses] == list(range(1, len(losses) + 1)), "no step is lost, none repeated"
    shared = {int(step): float(loss) for step, loss in losses if int(step) in torchrun.losses}
    assert shared == pytest.approx(torchrun.losses, abs=1e-6)
