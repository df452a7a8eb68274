"""Starts a Prometheus that scrapes the demo's server (`shoal demo --keep --prometheus`), where one is installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

_READY_S = 30.0
_POLL_S = 0.1
_SCRAPE_S = 2


class PrometheusProcess:
    """A running Prometheus on loopback; its files are below the demo's folder."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url
        self.pid = process.pid

    def stop(self) -> None:
        """Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PrometheusProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_prometheus(target: str, folder: Path, token_file: Path) -> PrometheusProcess | None:
    """One that scrapes the service at the URL `target` every two seconds, once it answers; None: it is not installed.
    `token_file` need not exist yet.

    Raises:
        OSError: it ended at once, or does not answer; the message has the end of its log.
    """
    program = shutil.which("prometheus")
    if program is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": f"{_SCRAPE_S}s", "scrape_timeout": f"{_SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "shoal",
                "authorization": {"credentials_file": str(token_file)},
                "static_configs": [{"targets": [urlsplit(target).netloc]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = _free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = PrometheusProcess(process, f"http://127.0.0.1:{port}")
    try:
        _await_ready(process, started.url, log)
    except BaseException:
        started.stop()
        raise
    return started


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_mono = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        if process.poll() is not None or time.monotonic() > deadline_mono:
            tail = " ".join(log.read_text(errors="replace").splitlines()[-3:])
            raise OSError(f"Prometheus is not ready after {_READY_S:g} s, or has ended: {tail}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
