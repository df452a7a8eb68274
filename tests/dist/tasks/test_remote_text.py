"""Text that is read where it lies: from an http server that fails now and then, and from an object store."""

from __future__ import annotations

import gzip
import io
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pytest
import s3fs
from pyarrow import parquet

from kit.processes.object_store import reach_s3, s3_server
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.sources import find_sources

pytestmark = pytest.mark.dist

TEXTS = [f"row {number}: " + "some words of text " * (number % 9) for number in range(600)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def _parquet() -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"text": TEXTS, "other": [b"x" * 1000] * len(TEXTS)})
    parquet.write_table(table, buffer, row_group_size=100)
    return buffer.getvalue()


FILES = {"/a.jsonl": JSONL, "/b.jsonl.gz": gzip.compress(JSONL), "/c.parquet": _parquet()}


@dataclass
class Server:
    """Serves FILES; `fails(number)`: status to answer a request with, 0: an answer that breaks off, None: the file."""

    fails: Callable[[int], int | None] = lambda number: None
    knows_ranges: bool = True
    port: int = 0
    num_requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}{name}"


@contextmanager
def _serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            with server.lock:
                server.num_requests += 1
                status = server.fails(server.num_requests)
            content = FILES.get(self.path)
            if status or content is None:
                self.send_response(status or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            given = self.headers.get("Range") if server.knows_ranges else None
            first, last = map(int, given.removeprefix("bytes=").split("-")) if given else (0, len(content) - 1)
            body = content[first : last + 1]
            self.send_response(206 if given else 200)
            self.send_header("Content-Length", str(len(body)))
            if given:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            if with_body:
                self.wfile.write(body[: len(body) // 2] if status == 0 else body)
            if status == 0:
                self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _hash(tmp_path: Path, *paths: str) -> str:
    config = TextDataConfig(paths=paths, cache_dir=str(tmp_path / "cache"))
    return prepare_corpus(config, lambda _: None).index.content_hash


@pytest.fixture
def expected(tmp_path: Path) -> str:
    """The content hash of the rows, read from a local file."""
    (tmp_path / "local.jsonl").write_bytes(JSONL)
    return _hash(tmp_path, str(tmp_path / "local.jsonl"))


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_an_http_server_is_that_file(name: str, knows_ranges: bool, tmp_path: Path, expected: str) -> None:
    with _serving(Server(knows_ranges=knows_ranges)) as server:
        assert _hash(tmp_path, server.url(name)) == expected


@pytest.mark.parametrize("name", ["/a.jsonl", "/c.parquet"])
def test_a_server_that_is_busy_or_breaks_off_is_asked_again(name: str, tmp_path: Path, expected: str) -> None:
    failures = {1: 503, 2: 503, 4: 429, 5: 0, 6: 500}
    with _serving(Server(fails=failures.get)) as server:
        assert _hash(tmp_path, server.url(name)) == expected
        assert server.num_requests > len(failures)


def test_an_answer_that_does_not_pass_is_said_at_once(tmp_path: Path) -> None:
    with _serving(Server()) as server:
        with pytest.raises(MissingTextError, match=r"data\.paths 'http://.*/none\.jsonl' names no file"):
            _hash(tmp_path, server.url("/none.jsonl"))
        assert server.num_requests == 2  # HEAD, then GET
    with _serving(Server(fails=lambda number: 403 if number > 1 else None)) as server:
        with pytest.raises(MissingTextError, match=r"a\.jsonl cannot be read: 403"):
            _hash(tmp_path, server.url("/a.jsonl"))
        assert server.num_requests == 2


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a bucket with FILES below text/. The store's address comes from the environment, as for a user."""
    with s3_server() as endpoint:
        reach_s3(monkeypatch, endpoint)
        store, bucket = s3fs.S3FileSystem(), f"bucket-{uuid.uuid4().hex}"
        store.mkdir(bucket)
        for name, content in FILES.items():
            store.pipe_file(f"{bucket}/text{name}", content)
        store.pipe_file(f"{bucket}/text/.hidden/d.txt", b"hidden")
        store.invalidate_cache()
        yield bucket


def test_an_object_store_is_read_by_file_pattern_and_directory(bucket: str, tmp_path: Path, expected: str) -> None:
    for name in FILES:
        assert _hash(tmp_path, f"s3://{bucket}/text{name}") == expected
    every = [f"s3://{bucket}/text{name}" for name in FILES]
    for entry in (f"s3://{bucket}/text/*.*", f"s3://{bucket}/text", f"s3://{bucket}/t*t"):
        sources = find_sources(TextDataConfig(paths=(entry,)))
        assert [source.location for source in sources] == every
        assert all(source.version for source in sources)
    with pytest.raises(MissingTextError, match="names no file"):
        find_sources(TextDataConfig(paths=(f"s3://{bucket}/nothing",)))
