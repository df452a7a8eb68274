"""What a program of a user's own costs under Shoal: a script and a loop, beside the same script under torchrun; the
same with the Trainer of Hugging Face; and a script of Ray Train, beside Ray Train.

    python bench/programs/main.py [--doors torchrun,script,loop,...] [--kills 5] [--workers 3] [--undisturbed 40]

For each door: seconds from the start (of torchrun, or of the submission to a server that is ready) to the first step;
the median seconds of a step; and, for each kill of a worker's process, the seconds from the signal to the next new
step, and how many steps were done again. Rank 0 of every program stamps its steps into a file, so all are measured in
one way. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

import itertools

from choices import some_of
from kit.processes.os_processes import adopt_orphans, end_tree, send
from kit.processes.ray_nodes import Nodes
from measurements.machine import describe
from shoal_server import serving
from shoal_service.cluster.embedded_cluster import EmbeddedCluster

HERE = Path(__file__).parent
_PATIENCE_S = 180.0
_LOOK_S = 0.005


@dataclass(slots=True)
class Measured:
    """What one door has shown."""

    start_s: float = 0.0
    step_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    """Steps that were done again after each kill."""


class Training:
    """A run of one door. `victims`: pids of the processes that are no rank 0's, of which one is killed."""

    def __init__(self, stamps: Path, victims: Callable[[], list[int]]) -> None:
        self._stamps = stamps
        self.victims = victims
        self.started_at = time.time()

    def steps(self) -> list[tuple[float, int]]:
        """When each step was done, in the order of the stamps."""
        lines = self._stamps.read_text().splitlines() if self._stamps.exists() else []
        return [(float(at), int(step)) for at, step in (line.split() for line in lines)]

    def wait_for_step(self, step: int) -> float:
        """Returns when that step was done first."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            if found := [at for at, done in self.steps() if done >= step]:
                return found[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not reached; the last ones are {self.steps()[-3:]}")
            time.sleep(_LOOK_S)


def measure(training: Training, kills: int, undisturbed: int, chance: random.Random) -> Measured:
    found = Measured(start_s=training.wait_for_step(1) - training.started_at)
    training.wait_for_step(undisturbed)
    times = [at for at, _ in training.steps()][undisturbed // 2 :]
    found.step_s = statistics.median(after - before for before, after in itertools.pairwise(times))
    for _ in range(kills):
        reached = training.steps()[-1][1]
        training.wait_for_step(reached + chance.randint(3, 12))
        time.sleep(chance.random() * found.step_s)
        while not (victims := training.victims()):  # those that were killed before are replaced
            time.sleep(_LOOK_S)
        victim = chance.choice(victims)
        before = training.steps()
        killed_at = send(victim, signal.SIGKILL)
        training.wait_for_step(before[-1][1] + 3)  # two steps may have been on their way
        after = training.steps()[len(before) :]
        newest = max(step for at, step in [*before, *after] if at <= killed_at + found.step_s)
        found.pauses_s.append(next(at for at, step in after if step > newest) - killed_at)
        found.repeated.append(len(after) - len({step for _, step in after} - {step for _, step in before}))
    return found


@contextmanager
def under_torchrun(folder: Path, workers: int, script: str = "script.py") -> Iterator[Training]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # otherwise a restart finds the addresses of the dead processes
        "STAMPS": str(folder / "stamps"),
        "SHOAL_CHECKPOINT_DIR": str(folder),
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"),
        *("--max-restarts=1000", "--monitor-interval=0.1", str(HERE / script)),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        yield Training(folder / "stamps", lambda: sorted(_children(process.pid))[1:])
    finally:
        end_tree(process.pid)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


@contextmanager
def under_shoal(folder: Path, workers: int, program: dict[str, Any], code: Path = HERE) -> Iterator[Training]:
    with serving(folder / "state", num_cpus=workers + 1) as server, server.client as client:
        spec = {
            "name": "program",
            **program,
            "code": {"working_dir": str(code), "env": {"STAMPS": str(folder / "stamps"), "OMP_NUM_THREADS": "1"}},
            "elasticity": {"min_workers": 1, "max_workers": workers},
            "checkpoint": {"url": str(folder / "checkpoints")},
        }
        started_at = time.time()
        job = client.submit(spec)

        def victims() -> list[int]:
            return [one.pid for one in client.workers(job.id) if one.rank not in (None, 0)]

        training = Training(folder / "stamps", victims)
        training.started_at = started_at
        try:
            yield training
        finally:
            client.cancel(job.id)
            client.wait(job.id, timeout_s=60)


@contextmanager
def under_ray_train(folder: Path, workers: int) -> Iterator[Training]:
    """Ray Train V2 on the kind of cluster that Shoal embeds. Its controller polls the workers each 0.1 s, not
    every 2 s, as it does by default."""
    cluster = EmbeddedCluster(folder / "cluster", num_cpus=workers + 1)
    try:
        cluster.start()
        nodes = Nodes(folder / "cluster")
        environment = {
            **os.environ,
            **nodes.environment,
            "RAY_ADDRESS": nodes.address,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
            "STAMPS": str(folder / "stamps"),
            "OMP_NUM_THREADS": "1",
        }
        started_at = time.time()
        command = [sys.executable, "-c", _START_RAY, str(HERE / "ray_train.py"), str(workers), str(folder)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            training = Training(folder / "stamps", lambda: _pids_of_ranks(folder))
            training.started_at = started_at
            yield training
        finally:
            end_tree(process.pid)
    finally:
        cluster.stop()


_START_RAY = """
import os, runpy, sys
import ray

sys.argv = sys.argv[1:]
variables = {name: os.environ[name] for name in ("STAMPS", "OMP_NUM_THREADS")}
ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(sys.argv[0]), **variables}})
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _pids_of_ranks(folder: Path) -> list[int]:
    """Processes of ranks other than 0 that live; the files of those that are gone are of an earlier group."""
    found = [int(path.read_text() or 0) for path in folder.glob("pid.*") if path.name != "pid.0"]
    return [pid for pid in found if pid and Path(f"/proc/{pid}").exists()]


def _shoal_ray_train(folder: Path, workers: int) -> AbstractContextManager[Training]:
    args = [str(workers), str(folder)]
    return under_shoal(folder, workers, {"script": {"file": "ray_train.py", "args": args, "launcher": "ray_train"}})


def _shoal_runs(**program: Any) -> Callable[[Path, int], AbstractContextManager[Training]]:
    return lambda folder, workers: under_shoal(folder, workers, program)


_DOORS: dict[str, Callable[[Path, int], AbstractContextManager[Training]]] = {
    "torchrun": under_torchrun,
    "script": _shoal_runs(script={"file": "script.py"}),
    "loop": _shoal_runs(loop={"file": "loop.py"}),
    "torchrun-trainer": lambda folder, workers: under_torchrun(folder, workers, "trainer.py"),
    "script-trainer": _shoal_runs(script={"file": "trainer.py"}),
    "loop-trainer": _shoal_runs(loop={"file": "trainer.py", "args": ["loop"]}),
    "ray-train": under_ray_train,
    "shoal-ray-train": _shoal_ray_train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", type=some_of([*_DOORS]), default=[*_DOORS])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--undisturbed", type=int, default=40, help="steps before the first kill")
    options = parser.parse_args()
    adopt_orphans()
    print(describe(), flush=True)
    found: dict[str, Measured] = {}
    for door in options.doors:
        with tempfile.TemporaryDirectory(prefix="shoal-programs-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            (folder / "checkpoints").mkdir()
            with _DOORS[door](folder, options.workers) as training:
                one = found[door] = measure(training, options.kills, options.undisturbed, random.Random(1))
        pauses = ", ".join(f"{pause:.2f}" for pause in one.pauses_s)
        print(
            f"{door:16} start {one.start_s:.2f} s, step {one.step_s * 1000:.1f} ms; kill to the next new step median "
            f"{statistics.median(one.pauses_s):.2f} s ({pauses}), steps done again {one.repeated}",
            flush=True,
        )
    print(
        json.dumps(
            {
                door: {
                    "start_s": round(one.start_s, 2),
                    "step_ms": round(one.step_s * 1000, 1),
                    "pause_s": [round(pause, 2) for pause in one.pauses_s],
                    "repeated": one.repeated,
                }
                for door, one in found.items()
            }
        )
    )


if __name__ == "__main__":
    main()
