"""A server of shards that stores nothing: the content is computed from the number of the sample, so a data set of
hundreds of terabytes takes no disk. It is as slow and as unreliable as it is asked to be.

    python tests/kit/processes/generated_shards.py [--latency-ms 50] [--throttled 0.02] [--failing 0.02] [--cut 0.02]

prints its port, and ends when its standard input is closed. Paths: /raw/<samples>x<bytes>/<shard>.bin has the records
one after the other, /mds/<samples>x<bytes>/<shard>.mds the same as an MDS shard. <shard> ends in a number; directories
may stand before it. /statistics says in JSON what was asked for. `verified` says which sample a record is.
"""

import argparse
import json
import random
import re
import select
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_HEAD_BYTES = 16
_TILE_BYTES = 1 << 20
_PATH = re.compile(r"/(raw|mds)/(\d+)x(\d+)/(?:.*/)?(?:[^/\d]*)(\d+)\.(?:bin|mds)$")
_COLUMNS = {
    "version": 2,
    "format": "mds",
    "column_names": ["data", "number"],
    "column_encodings": ["bytes", "int"],
    "column_sizes": [None, 8],
    "compression": None,
    "hashes": [],
    "size_limit": 1 << 26,
}
FAULTS = ("throttled", "failing", "cut")


def _tile(num_bytes: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


_TILE = _tile(_TILE_BYTES)


def records(first: int, num: int, num_bytes: int) -> Any:
    """Samples `first` and the following ones: uint8 of shape (num, num_bytes)."""
    numbers = np.arange(first, first + num, dtype=np.uint64)
    mixed = _mixed(numbers)
    found = np.empty((num, num_bytes), dtype=np.uint8)
    found[:, :8] = numbers.view(np.uint8).reshape(num, 8)
    found[:, 8:16] = mixed.view(np.uint8).reshape(num, 8)
    payload = num_bytes - _HEAD_BYTES
    windows = sliding_window_view(_TILE, payload) if payload else np.empty((1, 0), np.uint8)
    found[:, 16:] = windows[(mixed % np.uint64(len(windows))).astype(np.int64)]
    return found


def verified(record: bytes) -> int:
    """The number of the sample. Raises AssertionError if a byte is not what it should be."""
    number = int.from_bytes(record[:8], "little")
    assert record == records(number, 1, len(record)).tobytes(), f"sample {number} has other bytes"
    return number


def _mixed(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(31))


class _Shard:
    """One file: a head, then records of one length."""

    def __init__(self, format: str, num_samples: int, num_bytes: int, shard: int) -> None:
        self._format, self._num_bytes, self._first = format, num_bytes, shard * num_samples
        self._each, self._head = num_bytes, b""
        if format == "mds":
            self._each = 4 + num_bytes + 8
            columns = json.dumps(_COLUMNS, sort_keys=True).encode()
            start = 4 * (num_samples + 2) + len(columns)
            offsets = start + np.arange(num_samples + 1, dtype=np.int64) * self._each
            self._head = np.uint32(num_samples).tobytes() + offsets.astype(np.uint32).tobytes() + columns
        self.num_bytes = len(self._head) + num_samples * self._each

    def read(self, start: int, end: int) -> bytes:
        head = self._head[start:end]
        start, end = max(0, start - len(self._head)), max(0, end - len(self._head))
        if start == end:
            return head
        first, last = start // self._each, -(-end // self._each)
        found = records(self._first + first, last - first, self._num_bytes)
        if self._format == "mds":
            sizes = np.full((len(found), 1), self._num_bytes, dtype="<u4").view(np.uint8)
            numbers = np.arange(self._first + first, self._first + last, dtype="<i8").view(np.uint8).reshape(-1, 8)
            found = np.concatenate([sizes, found, numbers], axis=1)
        return head + found.reshape(-1)[start - first * self._each : end - first * self._each].tobytes()


class GeneratedShards:
    """The test's end of a server in another process."""

    def __init__(self, port: int) -> None:
        self.port = port

    def pattern(self, num_shards: int, *, samples: int, num_bytes: int, format: str = "raw") -> str:
        """Shards 0 .. num_shards - 1, as a pattern."""
        last = num_shards - 1
        suffix = "bin" if format == "raw" else format
        width = len(str(last))
        return f"http://127.0.0.1:{self.port}/{format}/{samples}x{num_bytes}/shard-{{{0:0{width}d}..{last}}}.{suffix}"

    def statistics(self) -> dict[str, int]:
        """Requests, bytes, shards that were sent whole in one answer, and answers of each kind of fault so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/statistics", timeout=30) as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def generated_shards(*, latency_ms: float = 0.0, **faults: float) -> Iterator[GeneratedShards]:
    """A server in a process of its own. `faults`: the share of requests that fail in each way, see FAULTS."""
    options = [text for name, value in faults.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, Path(__file__), "--latency-ms", str(latency_ms), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield GeneratedShards(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def _handler(latency_s: float, faults: dict[str, float], counts: Counter[str]) -> type[BaseHTTPRequestHandler]:
    random_numbers, lock = random.Random(1), threading.Lock()

    def count(**values: int) -> None:
        with lock:
            counts.update(values)

    def fault() -> str:
        with lock:
            drawn = random_numbers.random()
        for name, share in faults.items():
            if drawn < share:
                return name
            drawn -= share
        return ""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            if self.path == "/statistics":
                with lock:
                    body = json.dumps(counts).encode()
                return self._send(200, body)
            time.sleep(latency_s)  # that of the network
            struck, found = fault(), _PATH.search(self.path)
            count(requests=1, **({struck: 1} if struck else {}))
            if struck in ("throttled", "failing"):
                return self._send(429 if struck == "throttled" else 503, b"")
            if found is None:
                return self._send(404, b"")
            shard = _Shard(found[1], int(found[2]), int(found[3]), int(found[4]))
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, end = (int(asked[1]), min(int(asked[2]) + 1, shard.num_bytes)) if asked else (0, shard.num_bytes)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(end - first))
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{end - 1}/{shard.num_bytes}")
            self.end_headers()
            if not with_body:
                return None
            body = shard.read(first, end)
            if struck == "cut":
                body = body[: len(body) // 2]
                self.close_connection = True
            self.wfile.write(body)
            count(bytes=len(body), whole=int(len(body) == shard.num_bytes))
            return None

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    for name in FAULTS:
        parser.add_argument(f"--{name}", type=float, default=0.0, help="share of the requests")
    arguments = parser.parse_args()
    faults = {name: getattr(arguments, name) for name in FAULTS}
    counts = Counter(requests=0, bytes=0, whole=0)
    server = _Server(("127.0.0.1", 0), _handler(arguments.latency_ms / 1000, faults, counts))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    while select.select([sys.stdin], [], [])[0] and sys.stdin.buffer.read(1):
        pass


if __name__ == "__main__":
    main()
