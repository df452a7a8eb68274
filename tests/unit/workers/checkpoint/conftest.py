"""Checkpoint roots on every kind of storage, and checkpoints made without torch."""

import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from shoal_workers.checkpoint.index import ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedFile, SavedPart

WriteParts = Callable[..., list[SavedPart]]


@pytest.fixture(params=["path", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A job's directory that does not exist yet."""
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/job"
        yield url
        memory = fsspec.filesystem("memory")
        if memory.exists(url):
            memory.rm(url, recursive=True)
    else:
        yield f"file://{tmp_path}/job" if request.param == "file" else f"{tmp_path}/job"


@pytest.fixture
def write_parts(root: str) -> WriteParts:
    """write_parts(step, attempt=1, generation=1, world_size=2): the parts of all ranks, durable, not committed."""

    def write(step: int, attempt: int = 1, generation: int = 1, world_size: int = 2) -> list[SavedPart]:
        directory = f"{root}/{CheckpointName(step, attempt, generation)}"
        place = open_directory(directory)
        place.create()
        parts = []
        for rank in range(world_size):
            payload = bytes((rank + step + i) % 251 for i in range(1000 * (rank + 1)))
            index = ShardIndex(
                rank=rank, world_size=world_size, generation=generation, step=step, items=(), extra={}
            ).to_json()
            contents = {payload_name(rank): payload, index_name(rank): index}
            for name, content in contents.items():
                place.write(name, [content])
            files = tuple(SavedFile(name=n, bytes=len(c), crc32=zlib.crc32(c)) for n, c in contents.items())
            parts.append(
                SavedPart(
                    generation=generation,
                    step=step,
                    rank=rank,
                    world_size=world_size,
                    directory=directory,
                    files=files,
                    stall_s=0.0,
                    write_s=0.0,
                )
            )
        return parts

    return write
