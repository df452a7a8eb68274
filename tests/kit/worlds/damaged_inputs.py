"""Small files of every format that data is read from, damages, and what the reader of a format makes of each.

A reading is whole, refused with the name of the file, or has fewer rows and counts them. Lines have no end mark: a file
of JSON lines or CSV that is cut behind a line is a whole file of fewer rows, and a text that is cut is a text. Formats
without checksums do not know of two bytes that were swapped; the number of rows is as before, or the file is refused.
"""

import csv
import gzip
import io
import json
import tarfile
import wave
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import feather, parquet

from kit.shards import samples
from shoal_workers.contract.text_data import LabelledTextConfig, TextDataConfig
from shoal_workers.data.audio import decode_audio, store_audio
from shoal_workers.data.documents import Position, read_documents
from shoal_workers.data.errors import DataError
from shoal_workers.data.images import PixelSettings, decoded
from shoal_workers.data.labelled import Labelled, prepare_rows
from shoal_workers.data.shard_formats import open_shard
from shoal_workers.data.sources import find_sources
from shoal_workers.tasks.conversations import encode_answer, find_row_files, load_encoder, read_file_rows
from shoal_workers.tasks.rows import read_class, read_text

_CLASSES = ("cat", "dog", "emu")
ROWS = [(f'{n}: a "naïve" line, ' + "word " * (n % 11), _CLASSES[n % 3]) for n in range(60)]


def _jsonl(encoding: str = "utf-8") -> bytes:
    return "".join(json.dumps({"text": t, "label": c}, ensure_ascii=False) + "\n" for t, c in ROWS).encode(encoding)


def _csv(encoding: str = "utf-8") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *ROWS])
    return file.getvalue().encode(encoding)


def _text(encoding: str = "utf-8") -> bytes:
    return "".join(f"{text}\n" for text, _ in ROWS).encode(encoding)


def _table() -> Any:
    return pyarrow.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]})


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
        for number, (text, label) in enumerate(ROWS[:10]):
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


def _image(kind: str, mode: str = "RGB") -> bytes:
    import PIL.Image

    deep, out = _pixels()[..., 0].astype(np.uint16) * 257, io.BytesIO()
    array = {"RGB": _pixels(), "grey 16": deep, "float": deep.astype(np.float32)}[mode]
    PIL.Image.fromarray(array).save(out, kind)
    return out.getvalue()


def _rows_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    """Texts with labels, and how many rows were left out."""

    def read(record: Any) -> Labelled:
        text = read_text(record.values[0], record.place, "text_field")
        return Labelled(text.encode(), (read_class(record.values[1], record.place, _CLASSES, 3),))

    config = LabelledTextConfig(paths=(str(path),), bad_rows=bad_rows, cache_dir=str(path.parent / "cache"))
    made = prepare_rows(config, ("text", "label"), "texts", [], read, lambda _: None)
    found = [(payload.decode(), _CLASSES[labels[0]]) for payload, labels in map(made.read, range(len(made)))]
    return found, made.num_left_out


def _documents_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    """The text of a file, as a language model reads it."""
    config = TextDataConfig(paths=(str(path),), encoding_errors="strict", cache_dir=str(path.parent / "cache"))
    documents = read_documents(find_sources(config), Position(), config)
    return b"".join(document.text for document in documents).decode().splitlines(), 0


def _samples(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return [{name: str(value) for name, value in one.items()} for one in open_shard(path)], 0


def _answers_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    """The rows of a task for answers."""
    pairs = [
        ({"prompt": row.get("text"), "completion": row.get("label")}, place)
        for row, place in read_file_rows(find_row_files([str(path)]))
    ]
    for pair, place in pairs:
        encode_answer(load_encoder("bytes"), pair, place)
    return [tuple(pair.values()) for pair, _ in pairs], 0


def _image_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return decoded(path.read_bytes(), PixelSettings(height=30, width=36), str(path)).tolist(), 0


def _audio_of(path: Path, bad_rows: str) -> tuple[list[Any], int]:
    return decode_audio(store_audio(str(path), str(path), 16_000, 30.0, str(path)), 16_000, str(path)).tolist(), 0


Read = Callable[[Path, str], tuple[list[Any], int]]
FORMATS: dict[str, tuple[Callable[[], bytes], Read]] = {
    "t.txt": (_text, _documents_of),
    "t.txt.gz": (lambda: gzip.compress(_text(), mtime=0), _documents_of),
    "a.jsonl": (_jsonl, _rows_of),
    "a.jsonl.gz": (lambda: gzip.compress(_jsonl(), mtime=0), _rows_of),
    "a.jsonl.zst": (lambda: pyarrow.compress(_jsonl(), "zstd", asbytes=True), _rows_of),
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
    "b.json": (_jsonl, _samples),
    "b.parquet": (_parquet, _samples),
    "b.arrow": (_arrow, _samples),
    "b.feather": (_feather, _samples),
    "b.tar": (_tar, _samples),
    "b.tar.gz": (lambda: gzip.compress(_tar(), mtime=0), _samples),
    "b.mds": (lambda: (samples.FILES / "mds-plain" / "shard.00000.mds").read_bytes(), _samples),
    "c.npy": (_npy, _image_of),
    "c.png": (lambda: _image("png"), _image_of),
    "grey-16.png": (lambda: _image("png", "grey 16"), _image_of),
    "c.jpg": (lambda: _image("jpeg"), _image_of),
    "c.bmp": (lambda: _image("bmp"), _image_of),
    "c.webp": (lambda: _image("webp"), _image_of),
    "c.tiff": (lambda: _image("tiff"), _image_of),
    "grey-16.tiff": (lambda: _image("tiff", "grey 16"), _image_of),
    "float.tiff": (lambda: _image("tiff", "float"), _image_of),
    "c.gif": (lambda: _image("gif"), _image_of),
    "c.ppm": (lambda: _image("ppm"), _image_of),
    "d.wav": (_wave, _audio_of),
    "d.flac": (lambda: b"fLaC" + _wave(), _audio_of),
}
REFUSED_WHOLE = ("float.tiff", "d.flac")
"""Their range is not known; no part of Shoal decodes it."""
_LINES = {"t.txt": _text, "a.jsonl": _jsonl, "a.csv": _csv, "e.jsonl": _jsonl, "e.csv": _csv, "b.json": _jsonl}


class Outcome(StrEnum):
    WHOLE = "read whole"
    REFUSED = "refused, with the file"
    SKIPPED = "rows left out and counted"
    SHORT = "a whole file of fewer lines"
    OTHER = "as many rows, with other values"
    WRONG = "wrong"


def damages(name: str, whole: bytes, every: int = 1000) -> Iterator[tuple[str, str, bytes]]:
    """Kind of a damage, which one it is, and the content of the file."""
    yield "none", "none", whole
    for cut in range(every, len(whole), every):
        yield "cut", f"cut at {cut}", whole[:cut]
    yield "cut", "without its last byte", whole[:-1]
    half = len(whole) // 2
    yield "halves swapped", "halves swapped", whole[half:] + whole[:half]
    for at in range(every // 2, len(whole) - 1, every):
        yield "two bytes swapped", f"bytes swapped at {at}", whole[:at] + whole[at : at + 2][::-1] + whole[at + 2 :]
    yield "empty", "empty", b""
    yield "wrong type", "text", b"This is no file of this kind.\n" * 40
    yield "wrong type", "another kind", _parquet() if name.endswith(("l", "v", ".gz", ".zst", "json")) else _jsonl()
    if name in _LINES:
        yield "wrong encoding", "latin-1", _LINES[name]("latin-1")
        yield "wrong encoding", "utf-16", _LINES[name]("utf-16")


def outcome_of(
    name: str, path: Path, bad_rows: str, kind: str, whole: bytes, expected: list[Any]
) -> tuple[Outcome, str]:
    """What the reader of a format makes of the file at `path`, and its message, or what is wrong."""
    _, read = FORMATS[name]
    content = path.read_bytes()
    try:
        found, num_left_out = read(path, bad_rows)
    except DataError as error:
        return (Outcome.REFUSED if str(path) in str(error) else Outcome.WRONG), str(error)
    except Exception as error:
        return Outcome.WRONG, f"{type(error).__name__}: {error}"
    rest = whole[len(content) :]
    if found == expected and not num_left_out:
        return Outcome.WHOLE, ""
    if num_left_out and all(row in expected for row in found):
        return Outcome.SKIPPED, f"{num_left_out} left out"
    ends_a_line = name.startswith("t.") or content.endswith(b"\n") or rest.startswith((b"\r", b"\n"))
    num_same = len(found) - name.startswith("t.")  # the last line of a text may be cut
    begins_alike = not found or found[:num_same] == expected[:num_same]
    if name in _LINES and whole.startswith(content) and ends_a_line and begins_alike:
        return Outcome.SHORT, f"{len(found)} of {len(expected)}"
    is_text = name.startswith("t.") and kind in ("wrong type", "halves swapped")  # any text is a text
    if is_text or (kind == "two bytes swapped" and len(found) + num_left_out == len(expected)):
        return Outcome.OTHER, ""
    return Outcome.WRONG, f"{len(found)} of {len(expected)} are read, {num_left_out} left out"


def readings(name: str, folder: Path, every: int = 1000) -> Iterator[tuple[str, str, str, Outcome, str]]:
    """Each damage of a format: its kind, which one, `bad_rows`, the outcome, and the message."""
    write, read = FORMATS[name]
    path, whole = folder / name, write()
    path.write_bytes(whole)
    expected = [] if name in REFUSED_WHOLE else read(path, "refuse")[0]
    for kind, which, content in damages(name, whole, every):
        path.write_bytes(content)
        for bad_rows in ("refuse", "skip") if read is _rows_of else ("refuse",):
            yield kind, which, bad_rows, *outcome_of(name, path, bad_rows, kind, whole, expected)
