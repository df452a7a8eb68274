"""The same promises on an object store: s3:// through moto's server on loopback."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator

import pytest
import s3fs
import torch

from kit.processes.object_store import reach_s3, s3_server
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_workers.checkpoint.errors import DamagedCheckpoint, StorageUnusable
from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def root(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a job's directory in a bucket. The object store's address comes from the environment, as for a
    user."""
    reach_s3(monkeypatch, endpoint)
    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/jobs/job"


@pytest.fixture
def catalog(root: str) -> CheckpointCatalog:
    return CheckpointCatalog(root)


def _save(catalog: CheckpointCatalog, step: int, values: torch.Tensor) -> list[SavedPart | SaveFailed]:
    reported: list[SavedPart | SaveFailed] = []
    for rank in range(2):
        writer = CheckpointWriter()
        writer.save(
            {f"w{rank}": values + rank},
            directory=catalog.url(CheckpointName(step, 1, 1)),
            rank=rank,
            world_size=2,
            generation=1,
            step=step,
            extra={"step": step},
            on_done=reported.append,
            owns_replicated=True,
        )
        writer.close()
    return reported


def _commit(catalog: CheckpointCatalog, step: int, values: torch.Tensor) -> CheckpointName:
    parts = [part for part in _save(catalog, step, values) if isinstance(part, SavedPart)]
    catalog.commit(parts, job_id="job", attempt=1, now=0.0)
    return CheckpointName(step, 1, 1)


def test_the_first_commit_of_an_object_store_stays(catalog: CheckpointCatalog) -> None:
    place = open_directory(catalog.url(CheckpointName(1, 1, 1)))
    assert place.create_file("COMMIT.json", b"first")
    assert not place.create_file("COMMIT.json", b"second")
    assert place.read("COMMIT.json") == b"first"


def test_checkpoint_is_saved_found_verified_loaded_and_retired(catalog: CheckpointCatalog) -> None:
    catalog.check_writable()
    first = _commit(catalog, 1, torch.randn(100))
    values = torch.randn(300_000)
    second = _commit(catalog, 2, values)
    _save(catalog, 3, values)
    assert catalog.search().name == second
    catalog.verify(second)
    state = {"w0": torch.empty(300_000), "w1": torch.empty(300_000)}
    assert load(state, directory=catalog.url(second)) == {"step": 2}
    assert torch.equal(state["w0"], values)
    assert torch.equal(state["w1"], values + 1)
    assert catalog.retain(1, damaged=(), in_flight=()) == [first]
    assert catalog.search(excluding=[second]).name is None


def test_file_of_several_parts_loads(catalog: CheckpointCatalog) -> None:
    values = torch.arange(9 << 20, dtype=torch.float32)  # 36 MiB: more than one part of an upload
    name = _commit(catalog, 10, values)
    loaded = torch.empty(9 << 20)
    load({"w0": loaded}, directory=catalog.url(name))
    assert torch.equal(loaded, values)


def test_damage_is_found(catalog: CheckpointCatalog) -> None:
    name = _commit(catalog, 20, torch.randn(1000))
    place = open_directory(catalog.url(name))
    content = bytearray(place.read("shard-00001.bin"))
    content[5] ^= 1
    place.write("shard-00001.bin", [bytes(content)])
    with pytest.raises(DamagedCheckpoint, match=r"shard-00001\.bin has crc32"):
        load({"w1": torch.empty(1000)}, directory=catalog.url(name))
    place.remove("shard-00001.bin")
    with pytest.raises(DamagedCheckpoint, match=r"shard-00001\.bin is missing"):
        load({"w0": torch.empty(1000)}, directory=catalog.url(name))
    place.remove(MARKER_NAME)
    with pytest.raises(DamagedCheckpoint, match="never committed"):
        load({"w0": torch.empty(1000)}, directory=catalog.url(name))


def test_an_upload_that_fails_midway_publishes_nothing(catalog: CheckpointCatalog, root: str) -> None:
    place = open_directory(root).child("probe")
    place.create()

    def failing() -> Iterator[bytes]:
        yield bytes(40 << 20)  # enough for the first part of the upload to be sent
        raise RuntimeError("the disk behind this is full")

    with pytest.raises(OSError, match="the disk behind this is full"):
        place.write("half", failing())
    with pytest.raises(FileNotFoundError):
        place.read("half")


def test_missing_bucket_is_unusable(root: str) -> None:
    with pytest.raises(StorageUnusable, match="Check that the bucket exists") as caught:
        CheckpointCatalog("s3://no-such-bucket/job").check_writable()
    assert "'s3://no-such-bucket/job'" in str(caught.value)


def test_missing_bucket_fails_the_part_not_the_training(root: str) -> None:
    reported = _save(CheckpointCatalog("s3://no-such-bucket/job"), 1, torch.randn(10))
    assert [type(outcome) for outcome in reported] == [SaveFailed, SaveFailed]


def test_store_that_does_not_answer_is_an_os_error(
    root: str, monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match=root):
        CheckpointCatalog(root).search()


@pytest.fixture
def unused_port() -> int:
    """An endpoint without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
