"""A real Prometheus that scrapes a service, and queries to it over the time in which it scraped a run."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from shoal_service.cluster.connects import find_free_port

_PROMETHEUS_READY_S = 30.0
_PROMETHEUS_POLL_S = 0.1
_SCRAPE_S = 2


@dataclass(frozen=True)
class History:
    """What a Prometheus has scraped between two times."""

    url: str
    start: float
    end: float
    step_s: float = 1.0

    def values(self, expr: str) -> list[float]:
        """Values of all series, at all times; without NaN. A query that Prometheus refuses fails the test."""
        times = {"start": self.start, "end": self.end, "step": self.step_s}
        found = self._get("query_range", query=expr, **times)["result"]
        numbers = [float(value) for series in found for _, value in series["values"]]
        return [number for number in numbers if not math.isnan(number)]

    def labels(self, expr: str, name: str) -> set[str]:
        """The values of a label among the series of a query."""
        times = {"start": self.start, "end": self.end, "step": self.step_s}
        found = self._get("query_range", query=expr, **times)["result"]
        return {series["metric"].get(name, "") for series in found}

    def exemplars(self, metric: str) -> list[dict[str, str]]:
        found = self._get("query_exemplars", query=metric, start=self.start, end=self.end)
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def _get(self, what: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=parameters, timeout=60)
        document = answer.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]


class PrometheusProcess:
    """A running Prometheus on loopback; its files are below a folder."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url
        self.pid = process.pid

    def stop(self) -> None:
        """End the process. Idempotent."""
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
    """Start a Prometheus that scrapes the service at the URL `target` every two seconds, and return it once it answers;
    None if it is not installed. `token_file` need not exist yet.

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
    port = find_free_port()
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
        _await_prometheus(process, started.url, log)
    except BaseException:
        started.stop()
        raise
    return started


def _await_prometheus(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_mono = time.monotonic() + _PROMETHEUS_READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PROMETHEUS_POLL_S)
        if process.poll() is not None or time.monotonic() > deadline_mono:
            tail = " ".join(log.read_text(errors="replace").splitlines()[-3:])
            raise OSError(f"Prometheus is not ready after {_PROMETHEUS_READY_S:g} s, or has ended: {tail}")
