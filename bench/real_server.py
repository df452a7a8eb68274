"""A real `shoal serve` with its embedded Ray cluster, for benchmarks: started on a free port, stopped in order."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal_api.client import Client, ServerError


@dataclass(frozen=True)
class RealServer:
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


def _is_ready(client: Client) -> bool:
    try:
        return bool(client.ready().owner)
    except ServerError:
        return False


@contextlib.contextmanager
def real_server(state_dir: Path, *, num_cpus: int) -> Iterator[RealServer]:
    """Ready for jobs: the cluster is connected and the lease is held."""
    command = [sys.executable, "-m", "shoal_api.cli.main", "serve", "--port", "0", "--num-cpus", str(num_cpus)]
    process = subprocess.Popen(
        [*command, "--state-dir", str(state_dir)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening on (\S+)", line):
                break
        else:
            raise SystemExit("shoal serve ended before it listened")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe fills up and blocks it
        server = RealServer(found.group(1), process.pid)
        with Client(server.url) as client:
            while not _is_ready(client):
                time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
