"""The path of somebody who has a clone and nothing else: seconds from an empty directory to the first step of a script.

    python bench/programs/first_step.py [--workers 2]

Each command is printed with its seconds: the wheel is built, installed into a new virtual environment, `shoal serve`
starts with its embedded Ray cluster, `shoal init script` writes a script, and `shoal submit` trains it. The downloads
of pip are counted, so the machine's network is measured too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tests", "tools"))

from kit.processes.os_processes import adopt_orphans, end_tree
from measurements.machine import describe

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 300.0
_LOOK_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    adopt_orphans()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-first-step-", ignore_cleanup_errors=True) as place:
        print(json.dumps({name: round(seconds, 1) for name, seconds in _walk(Path(place), options.workers).items()}))


def _walk(place: Path, workers: int) -> dict[str, float]:
    """Returns seconds by what was done. `place` is empty."""
    found: dict[str, float] = {}
    port = _free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SHOAL_URL": f"http://127.0.0.1:{port}", "SHOAL_STATE_DIR": str(place / "state")}
    work = place / "work"
    work.mkdir()

    def run(name: str, *command: str) -> str:
        print("$", shlex.join(word.removeprefix(f"{place}/") for word in command), flush=True)
        start = time.perf_counter()
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"status {done.returncode}\n{done.stdout}{done.stderr}")
        found[name] = time.perf_counter() - start
        print(f"  {found[name]:.1f} s", flush=True)
        return done.stdout

    run("wheel", sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(place), str(ROOT))
    run("environment", sys.executable, "-m", "venv", str(place / "venv"))
    shoal = str(place / "venv" / "bin" / "shoal")
    pip = [str(place / "venv" / "bin" / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    run("install", *pip, str(next(place.glob("*.whl"))))
    serve = [shoal, "serve", "--port", str(port), "--num-cpus", str(workers + 1)]
    print("$", shlex.join(word.removeprefix(f"{place}/") for word in serve), "&", flush=True)
    start = time.perf_counter()
    with (place / "serve.log").open("wb") as log:
        server = subprocess.Popen(serve, cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        while subprocess.run([shoal, "jobs"], cwd=work, env=environment, capture_output=True).returncode:
            _give_up_after(start, server, place / "serve.log")
            time.sleep(_LOOK_S)
        found["serve"] = time.perf_counter() - start
        print(f"  {found['serve']:.1f} s", flush=True)
        run("init", shoal, "init", "script")
        start = time.perf_counter()
        job = run("submit", shoal, "submit", "script/train.py", "--workers", str(workers)).split()[0]
        while not _has_stepped(shoal, job, work, environment):
            _give_up_after(start, server, place / "serve.log")
            time.sleep(_LOOK_S)
        found["first_step"] = time.perf_counter() - start
        print(f"  the first step, after {found['first_step']:.1f} s", flush=True)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        finally:
            end_tree(server.pid)
    return found


def _has_stepped(shoal: str, job: str, work: Path, environment: dict[str, str]) -> bool:
    command = [shoal, "show", job, "--json"]
    shown = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=True).stdout
    return bool(json.loads(shown)["status"]["step"])


def _give_up_after(start: float, server: subprocess.Popen[bytes], log: Path) -> None:
    if server.poll() is not None or time.perf_counter() - start > _PATIENCE_S:
        sys.exit(log.read_text(errors="replace")[-4000:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
