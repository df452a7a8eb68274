"""Every format with every damage: read whole, or refused with the file, or rows are left out and counted.

Lines have no end mark: a file of JSON lines or CSV that is cut behind a line is a whole file of fewer rows, which is
allowed here and said in docs/data.md.
"""

import csv
import gzip
import io
import json
import tarfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, parquet

from kit.shards import samples
from shoal_workers.contract.encoders import LabelledTextConfig
from shoal_workers.data.audio import samples_of, stored_audio
from shoal_workers.data.errors import DataError
from shoal_workers.data.images import PixelSettings, decoded
from shoal_workers.data.labelled import Labelled, prepare_rows
from shoal_workers.data.shard_formats import open_shard
from shoal_workers.tasks.conversations import answer_of, load_encoder, rows_in
from shoal_workers.tasks.rows import class_of, text_of

_CLASSES = ("cat", "dog", "emu")
_ROWS = [(f'{n}: a "naïve" line, ' + "word " * (n % 11), _CLASSES[n % 3]) for n in range(60)]


def _jsonl(encoding: str = "utf-8") -> bytes:
    return "".join(json.dumps({"text": t, "label": c}, ensure_ascii=False) + "\n" for t, c in _ROWS).encode(encoding)


def _csv(encoding: str = "utf-8") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *_ROWS])
    return file.getvalue().encode(encoding)


def _table() -> Any:
    return pyarrow.table({"text": [text for text, _ in _ROWS], "label": [label for _, label in _ROWS]})


def _parquet() -> bytes:
    out = io.BytesIO()
    parquet.write_table(_table(), out, row_group_size=20)
    return out.getvalue()


def _arrow() -> bytes:
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=10)
    return out.getvalue()


def _feather() -> bytes:
    out = io.BytesIO()
    feather.write_feather(_table(), out, compression="zstd", chunksize=10)
    return out.getvalue()


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, (text, label) in enumerate(_ROWS[:10]):
            for field, content in (("txt", text.encode()), ("cls", label.encode())):
                member = tarfile.TarInfo(f"{number:03}.{field}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, _pixels())
    return out.getvalue()


def _wave() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((np.sin(np.arange(2000) / 5) * 20_000).astype("<i2").tobytes())
    return out.getvalue()


def _pixels() -> Any:
    return np.random.default_rng(0).integers(0, 256, (30, 36, 3), np.uint8)


def _image(kind: str) -> bytes:
    out = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(_pixels()).save(out, kind)
    return out.getvalue()


def _rows_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    """Texts with labels, and how many rows were left out."""

    def read(record: Any) -> Labelled:
        text = text_of(record.values[0], record.place, "text_field")
        return Labelled(text.encode(), (class_of(record.values[1], record.place, _CLASSES, 3),))

    config = LabelledTextConfig(paths=(str(path),), bad_rows=bad_rows, cache_dir=str(path.parent / "cache"))
    made = prepare_rows(config, ("text", "label"), "texts", [], read, lambda _: None)
    found = [(payload.decode(), _CLASSES[labels[0]]) for payload, labels in map(made.of, range(len(made)))]
    return found, made.num_left_out


def _samples(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return [{name: str(value) for name, value in one.items()} for one in open_shard(path)], 0


def _answers_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    """The rows of a task for answers."""
    pairs = [({"prompt": row.get("text"), "completion": row.get("label")}, place) for row, place in rows_in([path])]
    for pair, place in pairs:
        answer_of(load_encoder("bytes"), pair, place)
    return [tuple(pair.values()) for pair, _ in pairs], 0


def _image_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return decoded(path.read_bytes(), PixelSettings(height=30, width=36), str(path)).tolist(), 0


def _audio_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return samples_of(stored_audio(str(path), str(path), 16_000, 30.0, str(path)), 16_000, str(path)).tolist(), 0


_Read = Callable[[Path, str], tuple[list[Any], int]]
_FORMATS: dict[str, tuple[Callable[[], bytes], _Read]] = {
    "a.jsonl": (_jsonl, _rows_of),
    "a.jsonl.gz": (lambda: gzip.compress(_jsonl(), mtime=0), _rows_of),
    "a.csv": (_csv, _rows_of),
    "a.csv.gz": (lambda: gzip.compress(_csv(), mtime=0), _rows_of),
    "a.parquet": (_parquet, _rows_of),
    "a.arrow": (_arrow, _rows_of),
    "a.feather": (_feather, _rows_of),
    "e.jsonl": (_jsonl, _answers_of),
    "e.jsonl.gz": (lambda: gzip.compress(_jsonl(), mtime=0), _answers_of),
    "e.csv": (_csv, _answers_of),
    "e.parquet": (_parquet, _answers_of),
    "e.arrow": (_arrow, _answers_of),
    "b.parquet": (_parquet, _samples),
    "b.arrow": (_arrow, _samples),
    "b.feather": (_feather, _samples),
    "b.tar": (_tar, _samples),
    "b.tar.gz": (lambda: gzip.compress(_tar(), mtime=0), _samples),
    "b.mds": (lambda: (samples.FILES / "mds-plain" / "shard.00000.mds").read_bytes(), _samples),
    "c.npy": (_npy, _image_of),
    "c.png": (lambda: _image("png"), _image_of),
    "c.jpg": (lambda: _image("jpeg"), _image_of),
    "c.bmp": (lambda: _image("bmp"), _image_of),
    "c.webp": (lambda: _image("webp"), _image_of),
    "c.tiff": (lambda: _image("tiff"), _image_of),
    "c.gif": (lambda: _image("gif"), _image_of),
    "c.ppm": (lambda: _image("ppm"), _image_of),
    "d.wav": (_wave, _audio_of),
}
_LINES = {"a.jsonl": _jsonl, "a.csv": _csv, "e.jsonl": _jsonl, "e.csv": _csv}


def _damages(name: str, whole: bytes) -> Iterator[tuple[str, bytes]]:
    for cut in range(1000, len(whole), 1000):
        yield f"cut at {cut}", whole[:cut]
    yield "without its last byte", whole[:-1]
    half = len(whole) // 2
    yield "swapped", whole[half:] + whole[:half]
    yield "empty", b""
    yield "text", b"This is no file of this kind.\n" * 40
    yield "another kind", _parquet() if name.endswith(("l", "v", ".gz")) else _jsonl()
    if name in _LINES:
        yield "latin-1", _LINES[name]("latin-1")
        yield "utf-16", _LINES[name]("utf-16")


def _is_cut_at_a_line(name: str, whole: bytes, content: bytes, found: list[Any], expected: list[Any]) -> bool:
    rest = whole[len(content) :]
    is_line_end = content.endswith(b"\n") or rest.startswith((b"\r", b"\n"))
    return name in _LINES and whole.startswith(content) and is_line_end and found == expected[: len(found)]


@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_damaged_inputs_are_read_whole_or_refused_with_the_file_or_left_out_and_counted(tmp_path: Path) -> None:
    failing = []
    for number, (name, (write, read)) in enumerate(_FORMATS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, whole = folder / name, write()
        path.write_bytes(whole)
        expected, _ = read(path, "refuse")
        assert len(expected) in (len(_ROWS), 10, 30, 2000) or name == "b.mds", name
        for damage, content in _damages(name, whole):
            path.write_bytes(content)
            for bad_rows in ("refuse", "skip") if read is _rows_of else ("refuse",):
                try:
                    found, num_left_out = read(path, bad_rows)
                except DataError as error:
                    if str(path) not in str(error):
                        failing.append((name, damage, bad_rows, f"the file is not named: {error}"))
                except Exception as error:
                    failing.append((name, damage, bad_rows, f"{type(error).__name__}: {error}"))
                else:
                    is_counted = bool(num_left_out) and all(one in expected for one in found)
                    is_cut_at_a_line = _is_cut_at_a_line(name, whole, content, found, expected)
                    if found != expected and not is_counted and not is_cut_at_a_line:
                        failing.append((name, damage, bad_rows, f"{len(found)} of {len(expected)} are read"))
    assert failing == []
