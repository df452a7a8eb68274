"""How fast text files become shards of tokens: as bytes, from rows, and with a BPE tokenizer on one core and on all.

    python bench/data.py [--mib 32] [--bpe-mib 8] [--rounds 5]

As bytes: eight files of random printable bytes. Rows: the same bytes, 2 KiB a row, as JSON lines (also compressed),
CSV, Parquet and Arrow. BPE: sources of the standard library, and a tokenizer of 8,000 tokens that is trained on some of
them (needs the extra `hf`); by the worker's own thread, by one more, by one per core. The last
line is JSON, each figure as minimum, median and maximum of the rounds: megabytes of text per second of wall-clock time
and of CPU time, and the share of the calling thread in that CPU time.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import tokenizers
from pyarrow import feather, parquet
from tokenizers import models, pre_tokenizers, trainers

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from measurements.machine import describe
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.machine_limits import allowed_cores

_FILES = 8
_ROW_BYTES = 2048
_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--bpe-mib", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        printable, sources = _printable(directory / "printable", arguments.mib), directory / "sources.txt"
        _write_sources(sources, arguments.bpe_mib)
        tokenizer = trained_tokenizer(directory / "tokenizer.json")
        cases = {
            "bytes": (printable, "bytes", 0),
            **{f"bytes, {path.name}": (path, "bytes", 0) for path in _written_as_rows(printable, directory / "rows")},
            "bpe, in the worker": (sources, tokenizer, 0),
            "bpe, 1 thread": (sources, tokenizer, 1),
            f"bpe, {allowed_cores()} threads": (sources, tokenizer, allowed_cores()),
        }
        figures: dict[str, list[_Round]] = {case: [] for case in cases}
        for turn in range(arguments.rounds):
            for number, (case, (text, named, num_threads)) in enumerate(cases.items()):
                cache = directory / f"cache-{turn}-{number}"
                config = TextDataConfig(paths=(str(text),), tokenizer=named, cache_dir=str(cache))
                found = _measured(config, num_threads)
                figures[case].append(found)
                print(f"{case:20} {found.wall:7.2f} MB/s, {found.cpu:7.2f} MB per second of CPU time", flush=True)
    ranges = {case: _ranges(rounds) for case, rounds in figures.items()}
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], **ranges}))


class _Round(NamedTuple):
    wall: float
    cpu: float
    own_share: float


def _measured(config: TextDataConfig, num_threads: int) -> _Round:
    own, cpu, wall = time.thread_time(), time.process_time(), time.perf_counter()
    megabytes = prepare_corpus(config, lambda _: None, num_threads=num_threads).index.text_bytes / 1e6
    wall, own, cpu = time.perf_counter() - wall, time.thread_time() - own, time.process_time() - cpu
    return _Round(megabytes / wall, megabytes / cpu, own / cpu)


def _ranges(rounds: list[_Round]) -> dict[str, list[float]]:
    names = ("wall_mb_per_s", "cpu_mb_per_s", "own_share")
    values = dict(zip(names, zip(*rounds, strict=True), strict=True))
    return {name: [round(f(found), 4) for f in (min, statistics.median, max)] for name, found in values.items()}


def _printable(directory: Path, mib: int) -> Path:
    directory.mkdir()
    rng = np.random.default_rng(0)
    for number in range(_FILES):
        text = rng.integers(32, 127, mib * _MIB // _FILES, dtype=np.uint8)
        (directory / f"{number}.txt").write_bytes(text.tobytes())
    return directory


def _written_as_rows(printable: Path, directory: Path) -> list[Path]:
    """A file of each format."""
    directory.mkdir()
    content = b"".join(path.read_bytes() for path in sorted(printable.iterdir())).decode()
    rows = [content[start : start + _ROW_BYTES] for start in range(0, len(content), _ROW_BYTES)]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    (directory / "a.jsonl").write_bytes(lines)
    (directory / "a.jsonl.gz").write_bytes(gzip.compress(lines, 6))
    with pyarrow.CompressedOutputStream(str(directory / "a.jsonl.zst"), "zstd") as stream:
        stream.write(lines)
    with (directory / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([row] for row in rows)])
    table = pyarrow.table({"text": rows})
    parquet.write_table(table, directory / "a.parquet")
    feather.write_feather(table, directory / "a.feather")
    return sorted(directory.iterdir())


def library_sources() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def _write_sources(path: Path, mib: int) -> None:
    with path.open("wb") as file:
        for source in itertools.cycle(library_sources()):
            file.write(source.read_bytes())
            if file.tell() >= mib * _MIB:
                break
        file.truncate(mib * _MIB)


def trained_tokenizer(path: Path) -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train([str(source) for source in library_sources()[:100]], trainer)
    made.save(str(path))
    return str(path)


if __name__ == "__main__":
    main()
