"""Shards that are streamed from a server: what is read, what several processes of a node share, and what is said when a
shard is not as it should be."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from kit.processes.generated_shards import GeneratedShards, generated_shards, records, verified
from kit.processes.warm import warm_python
from kit.shards.samples import FILES
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.data.errors import DataError, MissingTextError, ShardSizeError
from shoal_workers.data.shard_formats import open_shard, read_index
from shoal_workers.data.streaming import FixedRecords, StreamedShards
from shoal_workers.data.streaming.cache import Claim, ShardCache

pytestmark = pytest.mark.dist

BYTES = 512
Streaming = Callable[..., StreamedShards]


@pytest.fixture(scope="module")
def server() -> Iterator[GeneratedShards]:
    with generated_shards() as running:
        yield running


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[Streaming]:
    """Makes a data set over a cache of this test; closed after it."""
    made: list[StreamedShards] = []

    def make(shards: Any, kind: Any = None, **settings: Any) -> StreamedShards:
        made.append(StreamedShards(shards, kind, **{"cache_dir": tmp_path / "cache", **settings}))
        return made[-1]

    yield make
    for data in made:
        data.close()


def test_the_first_batches_come_before_any_shard_is_here(server: GeneratedShards, streaming: Streaming) -> None:
    """Each shard has 40 TB, so what is read was asked for by its range."""
    pattern = server.pattern(1000, samples=10**10, num_bytes=4096)
    data = streaming(pattern, FixedRecords(4096), decode=verified, cache_bytes=1 << 50, num_threads=1)
    assert len(data) == 10**13
    for step in range(3):
        indices = data.samples_at(range(step * 16, step * 16 + 16), 3)
        assert [data[index] for index in indices] == indices
    many = data.samples_at(range(10**12, 10**12 + 40), 3)
    assert data.__getitems__(many) == many


def test_a_table_of_samples_is_read_by_its_range(server: GeneratedShards, streaming: Streaming, tmp_path: Path) -> None:
    """So are the samples of an MDS shard, and they are the same once the shard is here."""
    pattern = server.pattern(20, samples=300, num_bytes=BYTES, format="mds")
    data = streaming(pattern, block_shards=4)
    before = server.statistics()["bytes"]
    assert len(data) == 20 * 300
    assert server.statistics()["bytes"] - before < 150_000, "less than the first shard"
    indices = data.samples_at(range(60), 1)
    assert [sample["number"] for sample in data.__getitems__(indices)] == indices
    assert [verified(data[index]["data"]) for index in indices] == indices


@pytest.mark.cells(12)
@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize("name", sorted(path.parent.name for path in FILES.glob("*/index.json")))
def test_shards_of_other_libraries_are_read_by_their_index(name: str, knows_ranges: bool, streaming: Streaming) -> None:
    index = (FILES / name / "index.json").read_bytes()
    expected = [
        sample for shard in read_index(name, index) for sample in open_shard(FILES / name / shard.name, index=index)
    ]
    with _serving(FILES / name, knows_ranges) as url:
        data = streaming(f"{url}/index.json", block_shards=2)
        assert len(data) == len(expected)
        for _ in range(2):
            _same(data.__getitems__(range(len(data))), expected)
        local = streaming(str(FILES / name / "index.json"), block_shards=2)
        _same([local[number] for number in range(len(local))], expected)
        assert local.content_hash == data.content_hash, "a copy elsewhere is the same data"


@pytest.mark.cells(1, 2)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_processes_of_a_node_fetch_a_shard_once_and_stay_below_the_limit(
    server: GeneratedShards, tmp_path: Path, share: float
) -> None:
    """Three processes read the same epoch, and the cache has room for this share of it."""
    samples, num_shards = 500, 24
    room = int(share * num_shards) * samples * BYTES
    before = server.statistics()["whole"]
    settings = {
        "shards": server.pattern(num_shards, samples=samples, num_bytes=BYTES),
        "cache_dir": str(tmp_path),
        "cache_bytes": room,
        "block_shards": 3,
    }
    readers = [
        subprocess.Popen([warm_python(), "-c", _READER, json.dumps(settings)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for reader in readers:
        output, _ = reader.communicate(timeout=200)
        assert reader.returncode == 0
        assert 0 < int(output) <= room
    assert share < 1.0 or 0 < server.statistics()["whole"] - before <= num_shards


def test_a_process_that_is_killed_leaves_neither_its_part_nor_its_locks(
    server: GeneratedShards, tmp_path: Path
) -> None:
    cache = ShardCache(tmp_path / "cache", 1000)
    holder = subprocess.Popen([warm_python(), "-c", _HOLDER, str(cache.directory)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    assert not isinstance(cache.claim("part", 400), Claim)
    assert not isinstance(cache.claim("other", 400), Claim), "the part and the shard in use take the room"
    holder.terminate()  # which it does not handle; a warm process is waited for then
    holder.wait()
    holder.stdout.close()
    assert isinstance(cache.claim("other", 900), Claim)
    assert cache.num_bytes() == 900


def test_a_damaged_local_copy_is_fetched_again(server: GeneratedShards, streaming: Streaming, tmp_path: Path) -> None:
    pattern = server.pattern(3, samples=50, num_bytes=BYTES, format="mds")
    data = streaming(pattern, block_shards=3, num_threads=1)
    assert data[7]["number"] == 7
    data.samples_at(range(1), 0)
    folder = tmp_path / "cache"
    data.close()
    cache = ShardCache(folder, 1 << 30)
    for shard in range(3):
        name = pattern.partition("{")[0] + f"{shard}.mds"
        if not cache.has(name):
            claim = cache.claim(name, 4000)
            assert isinstance(claim, Claim)
            cache.commit(claim)
    for path in folder.glob("shard-*"):
        path.write_bytes(b"\0" * 100)
    assert [sample["number"] for sample in data.__getitems__([0, 60, 149])] == [0, 60, 149]


def test_a_shard_of_another_size_is_named_with_both_numbers(streaming: Streaming, tmp_path: Path) -> None:
    for number, num in enumerate((10, 10, 7, 10)):
        (tmp_path / f"{number}.bin").write_bytes(records(number * 10, num, 32).tobytes())
    data = streaming(str(tmp_path / "{0..3}.bin"), FixedRecords(32))
    assert len(data) == 40
    with pytest.raises(ShardSizeError, match=r"2\.bin has 7 samples, and 10 are expected there"):
        data[25]
    (tmp_path / "3.bin").write_bytes(records(30, 4, 32).tobytes())
    (tmp_path / "2.bin").write_bytes(records(20, 10, 32).tobytes())
    smaller = streaming(str(tmp_path / "{0..3}.bin"), FixedRecords(32), num_samples=34, decode=verified)
    assert sorted(smaller.__getitems__(range(34))) == list(range(34))


def test_shards_that_do_not_exist_and_arguments_that_do_not_fit_are_named(
    server: GeneratedShards, streaming: Streaming
) -> None:
    url = f"http://127.0.0.1:{server.port}/none-{{0..3}}.bin"
    with pytest.raises(MissingTextError, match=r"none-0\.bin does not exist"):
        streaming(url, FixedRecords(32))
    data = streaming(url, FixedRecords(32), samples_per_shard=5)
    with pytest.raises(MissingTextError, match=r"none-2\.bin does not exist"):
        data[12]
    for wrong, words in (
        ({"num_shards": 4}, "num_shards=4, but the pattern"),
        ({"block_shards": 0}, "block_shards=0"),
        ({"samples_per_shard": 5, "num_samples": 3}, "num_samples=3 does not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            streaming(url, FixedRecords(32), **wrong)
    with pytest.raises(DataError, match=r"cache_bytes=100 is less"):
        streaming(server.pattern(3, samples=9, num_bytes=BYTES), _WholeOnly(BYTES), cache_bytes=100)


def test_a_shard_without_a_table_is_fetched_when_it_is_needed(server: GeneratedShards, streaming: Streaming) -> None:
    pattern = server.pattern(8, samples=40, num_bytes=BYTES)
    data = streaming(pattern, _WholeOnly(BYTES), decode=verified, block_shards=3, cache_bytes=4 * 40 * BYTES)
    for start in range(0, 640, 20):
        indices = data.samples_at(range(start, start + 20), 9)
        assert data.__getitems__(indices) == indices


def test_a_pickled_copy_reads_the_same(server: GeneratedShards, streaming: Streaming) -> None:
    data = streaming(server.pattern(8, samples=40, num_bytes=BYTES), FixedRecords(BYTES))
    copy = pickle.loads(pickle.dumps(data))
    assert (copy.content_hash, copy.samples_at(range(9), 1)) == (data.content_hash, data.samples_at(range(9), 1))
    assert copy[5] == data[5] == records(5, 1, BYTES).tobytes()
    copy.close()


def test_the_identity_has_all_that_the_order_depends_on(streaming: Streaming, tmp_path: Path) -> None:
    names = ["s3://b/{0..9}.bin", "s3://c/{0..9}.bin", "s3://b/{0..8}.bin"]
    settings: dict[str, Any] = {"samples_per_shard": 5}
    first, moved, fewer = (streaming(name, FixedRecords(8), **settings).content_hash for name in names)
    blocks = streaming(names[0], FixedRecords(8), **settings, block_shards=4).content_hash
    sizes = streaming(names[0], FixedRecords(8), samples_per_shard=6).content_hash
    records_of_4 = streaming(names[0], FixedRecords(4), **settings).content_hash
    assert first == moved
    assert len({first, fewer, blocks, sizes, records_of_4}) == 5


@pytest.mark.cells(2)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_task_that_streams_loses_no_step_and_changes_no_loss(
    make_job: Any, server: GeneratedShards, tmp_path: Path, num_workers: int
) -> None:
    def job_of(name: str, steps: int, num_workers: int) -> Any:
        data = {
            "shards": server.pattern(30, samples=20, num_bytes=BYTES),
            "record_bytes": BYTES,
            "block_shards": 4,
            "cache_dir": str(tmp_path / name),
            "cache_bytes": 10 * 20 * BYTES,
        }
        batch = {"global_size": 8, "micro_size": 2, "num_workers": num_workers}
        return make_job(
            name, memory=True, task="streamed_tasks:Streamed", data=data, batch=batch, stop={"steps": steps}
        )

    alone = job_of("alone", 9, 0)
    [worker] = alone.workers(1)
    [end] = alone.run([worker], layout=replicated(1))
    assert end.kind is ExitKind.FINISHED, end
    job = job_of("killed", 9, num_workers)
    survivor, source = job.lose_one_of_two("forward", 4)
    larger = [survivor, *job.workers(2)]
    ends = job.run(larger, layout=replicated(3), restore_snapshot=source)
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 3, ends
    assert job.losses(larger) == pytest.approx(alone.losses([worker]), abs=3e-7)


class _WholeOnly(FixedRecords):
    """As if the samples had no table."""

    def open_by_ranges(self, shard: Any) -> None:
        return None


_READER = """
import json, sys
from pathlib import Path
from shoal_workers.data.streaming import FixedRecords, StreamedShards
data = StreamedShards(kind=FixedRecords(512), **json.loads(sys.argv[1]))
largest = 0
for start in range(0, len(data), 50):
    indices = data.samples_at(range(start, start + 50), 1)
    read = data.__getitems__(indices)
    assert [int.from_bytes(record[:8], "little") for record in read] == indices
    if start % 500 == 0:
        largest = max(largest, data._reader.shards._cache.num_bytes())
print(largest)
"""
_HOLDER = """
import sys, threading
from pathlib import Path
from shoal_workers.data.streaming.cache import ShardCache
cache = ShardCache(Path(sys.argv[1]), 1000)
claim = cache.claim("whole", 300)
cache.commit(claim)
held, part = cache.open_shard("whole"), cache.claim("part", 400)
print("holds", flush=True)
threading.Event().wait()
"""


@contextmanager
def _serving(folder: Path, knows_ranges: bool) -> Iterator[str]:
    """Serves the files of a folder."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, directory=str(folder), **named)

        def do_GET(self) -> None:
            given = self.headers.get("Range") if knows_ranges else None
            if given is None:
                super().do_GET()
                return
            content = Path(self.translate_path(self.path)).read_bytes()
            first, last = map(int, given.removeprefix("bytes=").split("-"))
            body = content[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _same(actual: Any, expected: Any) -> None:
    """Equal, with tensors and arrays somewhere inside."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            _same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for item, other in zip(actual, expected, strict=True):
            _same(item, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif hasattr(expected, "tobytes"):
        assert actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()
    else:
        assert actual == expected
