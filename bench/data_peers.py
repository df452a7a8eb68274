"""Samples of local shards: how fast they are read, the first batch, a resume and the memory, beside other loaders.

    python bench/data_peers.py [--samples 4096] [--kib 16] [--batch 32] [--workers 2] [--rounds 3] [--peers PYTHON]

The same samples (random bytes and a number) are written once as WebDataset tar, MDS, LitData, Parquet and JSON lines,
4 MiB a shard, by this program. Each loader reads all of them in shuffled order, with the same number of processes,
and makes batches of tensors. It is measured in a process of its own: samples per second after the first batch,
seconds from its construction to the first batch, seconds to the first batch after a resume in the middle of the
epoch, and the memory (PSS) of its processes at the end. `--peers` is an interpreter that has mosaicml-streaming and
litdata: an environment of its own, since they ask for other versions of numpy and transformers. What it lacks is left
out, with the reason. The files are in the page cache. The last line is JSON, each figure as minimum, median and
maximum of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tools"))

FORMATS = ("tar", "mds", "litdata", "parquet", "jsonl")
CASES = (
    *(("shoal", format) for format in FORMATS),
    ("torch DataLoader", "tar"),
    ("torch DataLoader", "parquet"),
    ("mosaicml-streaming", "mds"),
    ("litdata", "litdata"),
)
PEERS = ("mosaicml-streaming", "litdata")
_SHARD_BYTES = 4 << 20
_PATIENCE_S = 120
_STATE: dict[str, Any] = {}
"""LitData's, in the middle of the epoch; its form is not documented, so it is taken from a loader that was there."""
_SHARDS = ("shoal_workers.data.sharded_files", "pyarrow.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--kib", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--case", nargs=2, help="of one measurement, which a process of its own makes")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        loader, format = arguments.case
        print(json.dumps(_measured(loader, format, arguments)))
        return
    from measurements.machine import describe

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, arguments.samples, arguments.kib << 10)
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.rounds):
            for case in CASES:
                one = _in_a_process(case, folder, arguments)
                if one is not None:
                    found.setdefault(", ".join(case), []).append(one)
    ranges = {
        case: {
            key: [round(f(one[key] for one in rounds), 4) for f in (min, statistics.median, max)] for key in rounds[0]
        }
        for case, rounds in found.items()
    }
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], **ranges}))


def _in_a_process(case: tuple[str, str], folder: Path, arguments: argparse.Namespace) -> dict[str, float] | None:
    python = arguments.peers if case[0] in PEERS else sys.executable
    options = [f"--{name}={getattr(arguments, name)}" for name in ("samples", "kib", "batch", "workers")]
    command = [python, __file__, *options, "--folder", str(folder), "--case", *case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()
        print(f"{', '.join(case):28} left out: {said[-1]}", flush=True)
        return None
    one: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{', '.join(case):28} {one}", flush=True)
    return one


def _measured(loader: str, format: str, arguments: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    open_loader = _LOADERS[loader]
    for module in _IMPORTED[loader]:  # before the clock starts: a job has imported them when its data is opened
        import_module(module)
    start = time.perf_counter()
    batches = open_loader(arguments.folder / format, arguments, 0)
    _check(next(batches), arguments)
    first_s = time.perf_counter() - start
    num_samples = 0
    start = time.perf_counter()
    for batch in batches:
        num_samples += _check(batch, arguments)
    samples_per_s = num_samples / (time.perf_counter() - start)
    assert num_samples >= arguments.samples - 2 * arguments.batch, num_samples
    pss = _pss_bytes()
    start = time.perf_counter()
    _check(
        next(open_loader(arguments.folder / format, arguments, arguments.samples // arguments.batch // 2)), arguments
    )
    return {
        "samples_per_s": samples_per_s,
        "first_batch_s": first_s,
        "resume_s": time.perf_counter() - start,
        "pss_mib": pss / 2**20,
    }


def _check(batch: Any, arguments: argparse.Namespace) -> int:
    raw, number = (batch["raw"], batch["number"]) if isinstance(batch, dict) else batch
    assert raw.shape[1] == arguments.kib << 10 and len(number) == len(raw)
    return len(raw)


def _decoded(sample: dict[str, Any]) -> tuple[Any, int]:
    """The same for each loader: bytes become a tensor."""
    import torch

    raw = sample["raw"]
    raw = bytes.fromhex(raw) if isinstance(raw, str) else raw
    number = sample["number"]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8), int(number)


def _shoal(folder: Path, arguments: argparse.Namespace, skip: int) -> Iterator[Any]:
    """As a task is read: `ShardedFiles`, Shoal's order, and readers ahead."""
    import itertools

    from shoal_workers.contract.batch_partition import sample_positions
    from shoal_workers.contract.checks.spec_errors import parse_spec
    from shoal_workers.engine.sample_order import training_order
    from shoal_workers.engine.step.batch_readers import BatchReaders, Request
    from shoal_workers.engine.task.task import LoadedTask

    size, num_steps = arguments.batch, arguments.samples // arguments.batch
    batch = {"global_size": size, "micro_size": size}
    spec = parse_spec({"name": "bench", "task": "bench:Task", "stop": {"steps": 1}, "batch": batch})
    task = LoadedTask(_Task(folder), spec)
    task.open_data()
    readers = BatchReaders(task, arguments.workers, 2, print)

    def requests(first: tuple[int, int]) -> Iterator[Request]:
        for step in itertools.takewhile(lambda step: step < num_steps, itertools.count(first[0])):
            positions = sample_positions(step, 0, global_size=size, micro_size=size)
            yield Request((step, 0), tuple(training_order(task.train_data, positions, seed=1)), step)

    stream = readers.stream("train", requests, lambda: None)
    try:
        for step in range(skip, num_steps):
            read = stream.get((step, 0))
            assert read is not None
            yield read[0]
    finally:
        readers.close()


class _Task:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build_dataset(self, split: str) -> Any:
        from shoal_workers.data.sharded_files import ShardedFiles

        return ShardedFiles(self._folder, decode=_decoded)


def _torch(folder: Path, arguments: argparse.Namespace, skip: int) -> Iterator[Any]:
    """A DataLoader over the same data set. It has no position: a resume reads what it passes over."""
    import itertools

    from torch.utils.data import DataLoader

    from shoal_workers.data.sharded_files import ShardedFiles

    data: Any = ShardedFiles(folder, decode=_decoded)
    loader = DataLoader(data, arguments.batch, shuffle=True, num_workers=arguments.workers, drop_last=True)
    yield from itertools.islice(loader, skip, None)


def _mosaic(folder: Path, arguments: argparse.Namespace, skip: int) -> Iterator[Any]:
    streaming: Any = import_module("streaming.base")
    import_module("streaming.base.util").clean_stale_shared_memory()

    class Decoded(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return _decoded(super().__getitem__(at))

    data = Decoded(local=str(folder), shuffle=True, batch_size=arguments.batch)
    loader = streaming.StreamingDataLoader(
        data, batch_size=arguments.batch, num_workers=arguments.workers, drop_last=True
    )
    if skip:
        state = {"epoch": 0, "sample_in_epoch": skip * arguments.batch, "num_canonical_nodes": 1, "shuffle_seed": 9176}
        data.load_state_dict({**state, "initial_physical_nodes": 1})
    yield from loader


def _litdata(folder: Path, arguments: argparse.Namespace, skip: int) -> Iterator[Any]:
    litdata: Any = import_module("litdata")

    class Decoded(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return _decoded(super().__getitem__(index))

    def opened() -> Any:
        data = Decoded(str(folder), shuffle=True, drop_last=True)
        return litdata.StreamingDataLoader(
            data, batch_size=arguments.batch, num_workers=arguments.workers, drop_last=True
        )

    loader = opened()
    if skip:
        loader.load_state_dict(_STATE)
    for number, batch in enumerate(loader, 1):
        if number == arguments.samples // arguments.batch // 2:
            _STATE.update(loader.state_dict())
        yield batch


_LOADERS = {
    "shoal": _shoal,
    "torch DataLoader": _torch,
    "mosaicml-streaming": _mosaic,
    "litdata": _litdata,
}


_IMPORTED = {
    "shoal": ("shoal_workers.engine.step.batch_readers", "shoal_workers.contract.checks.spec_errors", *_SHARDS),
    "torch DataLoader": ("torch.utils.data", *_SHARDS),
    "mosaicml-streaming": ("streaming.base.util", "streaming.base"),
    "litdata": ("litdata",),
}


def _pss_bytes() -> int:
    """Memory of this process and its children; shared pages are divided among those that share them."""
    from multiprocessing import active_children

    pids = [os.getpid(), *(child.pid or 0 for child in active_children())]
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def write(folder: Path, num_samples: int, num_bytes: int) -> None:
    """All formats, in a folder each."""
    rng = np.random.default_rng(0)
    rows = [(rng.bytes(num_bytes), number) for number in range(num_samples)]
    per_shard = max(1, _SHARD_BYTES // num_bytes)
    shards = [rows[first : first + per_shard] for first in range(0, num_samples, per_shard)]
    for format in FORMATS:
        (folder / format).mkdir()
        for number, shard in enumerate(shards):
            _WRITERS[format](folder / format, number, shard)
    _write_indexes(folder, shards)


def _write_tar(folder: Path, number: int, rows: list[tuple[bytes, int]]) -> None:
    with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
        for raw, n in rows:
            for name, content in (("raw", raw), ("number", str(n).encode())):
                info = tarfile.TarInfo(f"{n:08d}.{name}")
                info.size = len(content)
                tar.addfile(info, BytesIO(content))


_MDS = {
    "column_encodings": ["int", "bytes"],
    "column_names": ["number", "raw"],
    "column_sizes": [8, None],
    "compression": None,
    "format": "mds",
    "hashes": [],
    "size_limit": _SHARD_BYTES,
    "version": 2,
}


def _write_mds(folder: Path, number: int, rows: list[tuple[bytes, int]]) -> None:
    samples = [struct.pack("<Iq", len(raw), n) + raw for raw, n in rows]
    _write_offsets(folder / f"shard.{number:05d}.mds", samples, json.dumps(_MDS).encode())


def _write_litdata(folder: Path, number: int, rows: list[tuple[bytes, int]]) -> None:
    items = [struct.pack("<II", len(raw), 8) + raw + struct.pack("<q", n) for raw, n in rows]
    _write_offsets(folder / f"chunk-0-{number}.bin", items, b"")


def _write_offsets(path: Path, samples: list[bytes], header: bytes) -> None:
    start = 4 * (len(samples) + 2) + len(header)
    offsets = np.cumsum([start, *map(len, samples)]).astype("<u4")
    path.write_bytes(struct.pack("<I", len(samples)) + offsets.tobytes() + header + b"".join(samples))


def _write_parquet(folder: Path, number: int, rows: list[tuple[bytes, int]]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"raw": [raw for raw, _ in rows], "number": [n for _, n in rows]})
    parquet.write_table(table, folder / f"{number:05d}.parquet", compression="none", use_dictionary=False)


def _write_jsonl(folder: Path, number: int, rows: list[tuple[bytes, int]]) -> None:
    lines = (json.dumps({"raw": raw.hex(), "number": n}) + "\n" for raw, n in rows)
    (folder / f"{number:05d}.jsonl").write_text("".join(lines))


_WRITERS = {
    "tar": _write_tar,
    "mds": _write_mds,
    "litdata": _write_litdata,
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
}


def _write_indexes(folder: Path, shards: list[list[tuple[bytes, int]]]) -> None:
    mds, litdata = [], []
    for number, rows in enumerate(shards):
        name = f"shard.{number:05d}.mds"
        stored = {"basename": name, "bytes": (folder / "mds" / name).stat().st_size, "hashes": {}}
        mds.append({**_MDS, "raw_data": stored, "samples": len(rows), "zip_data": None})
        name = f"chunk-0-{number}.bin"
        size = (folder / "litdata" / name).stat().st_size
        litdata.append({"chunk_bytes": size, "chunk_size": len(rows), "dim": None, "filename": name})
    (folder / "mds" / "index.json").write_text(json.dumps({"shards": mds, "version": 2}))
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {"type": "builtins.dict", "context": '["raw", "number"]', "children_spec": [leaf, leaf]}
    config = {
        "chunk_bytes": _SHARD_BYTES,
        "chunk_size": None,
        "compression": None,
        "data_format": ["bytes", "int"],
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    index = {"chunks": litdata, "config": config, "updated_at": "0"}
    (folder / "litdata" / "index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
