"""One command for a machine with a GPU and no network: `python bench/gpu_checks.py [PART...]`.

    info       versions of torch, CUDA, NCCL and Triton, the GPU, and other installations of torch
    cell       one of two replicas lost, dp_replicate 2 x dp_shard 2, with NCCL
    waits      what makes the host wait for the GPU, per step, of five kinds of training
    speed      bench/gpu.py --trials 1 --steps 16
    snapshot   bench/gpu_snapshots.py: what a snapshot of a model of 1.3 B parameters costs
    tests      the tests of `make test-gpu`, a process for each module

The parts run one after the other, each with a limit of its own, and go on when one fails. A table of their results is
printed at the end; their whole output is in the folder $OUT, by default build/gpu-checks. Without a PART the first four
run. Needs Shoal's sources, and the packages that its tests import; without a GPU what can runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PYTEST = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--timeout=120"]
_CASES = ("plain", "batchnorm", "adapters", "plain-whole", "loop")
_REPLICAS = "tests/dist/state/test_replicas.py::test_the_loss_of_all_nodes_of_one_replica_loses_one_step_at_most"
_MODULES = (
    "tests/dist/group/test_failures.py",
    "tests/dist/group/test_re_forming.py",
    "tests/dist/group/test_every_phase.py",
    "tests/dist/state/test_transitions.py",
    "tests/dist/state/test_replicas.py",
    "tests/dist/step/test_parity.py",
    "tests/dist/step/test_techniques.py",
    "tests/dist/parallel/test_layouts.py",
    "tests/dist/deterministic",
    "tests/dist/process/test_profiling.py",
)


_VERSIONS = """
import ctypes, sys, torch
has_gpu = torch.cuda.is_available()
loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line})
version = ctypes.c_int()
if loaded:  # torch's own function gives the version that it was built with
    ctypes.CDLL(loaded[0]).ncclGetVersion(ctypes.byref(version))
name = torch.cuda.get_device_name() if has_gpu else "no GPU"
python = sys.version.split()[0]
print(f"Python {python}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {version.value} {loaded}, {name}")
"""


@dataclass(frozen=True)
class Result:
    """What the table says of a part."""

    part: str
    status: str
    seconds: float
    summary: str


@dataclass(frozen=True)
class _Ended:
    status: int | None
    """None if its limit ended it."""
    seconds: float
    output: str

    @property
    def word(self) -> str:
        return "too long" if self.status is None else "ok" if self.status == 0 else f"exit {self.status}"


def main() -> int:
    arguments = _arguments()
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-checks")
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in arguments.parts or ("info", "cell", "waits", "speed"):
        start = time.monotonic()
        try:
            status, summary = _PARTS[name](out)
        except Exception as error:
            status, summary = "failed", f"{type(error).__name__}: {error}"
        results.append(Result(name, status, time.monotonic() - start, summary))
        print(f"== {name}: {status} in {results[-1].seconds:.0f} s. {summary}", flush=True)
    table = "\n".join(f"{r.part:9} {r.status:9} {r.seconds:6.0f} s  {r.summary}" for r in results)
    (out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}")
    return int(any(result.status != "ok" for result in results))


def _info(out: Path) -> tuple[str, str]:
    torch = _run("info", [sys.executable, "-c", _VERSIONS], 60, out)
    if _has_gpu():
        _run("smi", ["nvidia-smi"], 20, out)
    found = _run("torches", ["find", "/", "-xdev", "-maxdepth", "8", "-name", "torch-*.dist-info"], 30, out)
    others = ", ".join(sorted(Path(line).name.removesuffix(".dist-info") for line in found.output.split()[:8]))
    return torch.word, f"{torch.output.strip().rpartition(chr(10))[2]}; found {others}"


def _cell(out: Path) -> tuple[str, str]:
    return _tested("cell", _run("cell", [*_PYTEST, "-m", "", f"{_REPLICAS}[hsdp-1]", f"{_REPLICAS}[hsdp-0]"], 110, out))


def _waits(out: Path) -> tuple[str, str]:
    answer, summaries, is_ok = out / "waits.json", [], True
    device = "cuda" if _has_gpu() else "cpu"
    program = str(ROOT / "tests" / "kit" / "programs" / "host_waits.py")
    processes = {}
    for case in _CASES:
        own = answer.with_name(f"waits-{case}.json")
        own.unlink(missing_ok=True)
        processes[case] = own, _start(f"waits-{case}", [sys.executable, program, str(own), device, case], out)
    end = time.monotonic() + 100
    for case, (own, process) in processes.items():
        ended = _end(f"waits-{case}", process, end, out)
        if ended.status != 0 or not own.exists():
            summaries.append(f"{case} {ended.word}")
            is_ok = False
            continue
        steps = json.loads(own.read_text())[case]
        places = Counter(f"{operation} {place}" for step in steps for operation, place in step)
        summaries.append(f"{case} {max(map(len, steps))}")
        print(f"   {case}: {[len(step) for step in steps]} {dict(places.most_common(8))}", flush=True)
    return "ok" if is_ok else "failed", f"waits of a step, {device}: {', '.join(summaries)}"


def _speed(out: Path) -> tuple[str, str]:
    ended = _run("speed", [sys.executable, "bench/gpu.py", "--trials", "1", "--steps", "16"], 200, out)
    return ended.word, _last_json(ended.output)


def _snapshot(out: Path) -> tuple[str, str]:
    ended = _run("snapshot", [sys.executable, "bench/gpu_snapshots.py"], 120, out)
    return ended.word, _last_json(ended.output)


def _tests(out: Path) -> tuple[str, str]:
    start, processes = time.monotonic(), {}
    for module in _MODULES:
        name = Path(module).stem
        processes[name] = _start(name, [*_PYTEST, "-m", "not (matrix or soak)", module], out)
    end, texts, is_ok = start + 420, [], True
    for name, process in processes.items():
        status, text = _tested(name, _end(name, process, end, out))
        is_ok &= status == "ok"
        texts.append(f"{name.removeprefix('test_')}: {text}")
    return "ok" if is_ok else "failed", "; ".join(texts)


def _tested(name: str, ended: _Ended) -> tuple[str, str]:
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", ended.output, re.M)
    last = ended.output.strip().splitlines()[-1:] or [""]
    for line in failed:
        print(f"   {name} failed: {line}", flush=True)
    return ended.word, f"{last[0].strip('= ')}{' FAILED ' + ', '.join(failed) if failed else ''}"


def _last_json(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return lines[-1] if lines else " ".join(output.strip().splitlines()[-2:])[-400:]


def _run(name: str, command: Sequence[str], limit_s: float, out: Path) -> _Ended:
    return _end(name, _start(name, command, out), time.monotonic() + limit_s, out)


def _start(name: str, command: Sequence[str], out: Path) -> tuple[subprocess.Popen[bytes], float]:
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=_environment(), start_new_session=True
        )
    return process, time.monotonic()


def _end(name: str, started: tuple[subprocess.Popen[bytes], float], end: float, out: Path) -> _Ended:
    process, start = started
    status: int | None
    try:
        status = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return _Ended(status, time.monotonic() - start, (out / f"{name}.log").read_text(encoding="utf-8", errors="replace"))


def _environment() -> Mapping[str, str]:
    folders = ("api", "service", "workers", "tests", "tests/kit/tasks", "tests/kit/programs", "bench", "tools")
    paths = [str(ROOT / folder) for folder in folders]
    own = {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        # the machine's own plugins of pytest may warn, and warnings are errors
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return {**os.environ, **own, "SHOAL_TEST_DEVICE": "cuda" if _has_gpu() else "cpu"}


@cache
def _has_gpu() -> bool:
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


_PARTS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "info": _info,
    "cell": _cell,
    "waits": _waits,
    "speed": _speed,
    "snapshot": _snapshot,
    "tests": _tests,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*_PARTS, []], help="default: the first four")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
