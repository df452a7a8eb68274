"""Media: what the training thread copies is bounded, and the recorder's thread stores it within its limits."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal_workers.contract.media import (
    FOLDER,
    MAX_CELLS,
    MAX_COPIED_BYTES,
    MAX_IMAGES,
    MAX_SAMPLE,
    MAX_TEXT_CHARS,
    MAX_TOUCHED_LINES,
    MediaRanks,
    MediaRecord,
    MediaSpec,
    RecordName,
    counted,
    spread,
    thinned_out,
)
from shoal_workers.engine.media.capture import capture
from shoal_workers.engine.media.encode import encode_image, encode_png, make_histogram, make_table
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.media.staging import Staging


def test_what_one_call_copies_is_bounded_whatever_is_logged() -> None:
    captured = capture(
        images={"large": [np.zeros((2000, 3000, 3), np.float64)] * 20, "tall": torch.zeros(3, 4000, 100)},
        histogram={"w": torch.zeros(3_000_000), "turned": torch.zeros(3000, 1000).T},
        table={"t": [{"a": "x" * 10_000, "b": number} for number in range(5000)]},
        text={"long": "x" * 1_000_000},
    )
    assert sum(image.content.nbytes for image in captured.images) <= MAX_COPIED_BYTES
    assert sum(math.prod(tensor.sample.shape) for tensor in captured.tensors) <= MAX_SAMPLE
    assert [tensor.num_values for tensor in captured.tensors] == [3_000_000, 3_000_000]
    assert len(captured.tables[0].rows) * 2 <= MAX_CELLS and captured.tables[0].num_rows == 5000
    assert len(captured.texts[0][1]) == MAX_TEXT_CHARS and captured.texts[0][2] == 1_000_000
    assert len(captured.notes) == 1 and "images: 5 of 21 were left out" in captured.notes[0]


def test_a_thinned_out_image_touches_few_cache_lines_unless_it_is_on_a_device() -> None:
    several = torch.zeros(1, 3, 1024, 1024).expand(64, 3, 1024, 1024)
    for values, pixels in ((several, 16), (torch.zeros(64, 3, 1024, 1024, device="meta"), 147)):
        images = capture(images={"x": values}).images
        assert [tuple(image.content[image.index].shape) for image in images] == [(3, pixels, pixels)] * MAX_IMAGES
        assert "th row and column of 1024 x 1024" in images[0].note
    tall = capture(images={"x": torch.zeros(1_000_000, 1)}).images[0]
    assert tall.content.nbytes <= MAX_COPIED_BYTES
    assert math.prod(tall.content.shape) <= MAX_TOUCHED_LINES


def test_lists_and_arrays_that_are_not_copied_as_a_whole_are_sampled_from_all_over() -> None:
    numbers = list(range(1_000_000))
    frozen = np.arange(1_000_000, dtype=np.float32)
    frozen.flags.writeable = False
    values = {"listed": numbers, "frozen": frozen, "turned": frozen.reshape(1000, 1000).T, "apart": frozen[::2]}
    for tensor in capture(histogram=values).tensors:
        bins = make_histogram(tensor)
        assert bins.num_sampled < bins.num_values and bins.low == 0.0, tensor.name
        assert bins.high > 990_000 and bins.mean == pytest.approx(500_000, rel=0.01), tensor.name
    assert make_histogram(capture(histogram={"few": [1, 2.5]}).tensors[0]).mean == 1.75
    with pytest.raises(TypeError, match="has a str in it"):
        capture(histogram={"x": [1.0, "two"]})


def test_cells_of_a_table_say_what_their_values_were() -> None:
    loss, listed = torch.tensor(0.5), [1]
    row = {"loss": loss, "scalar": np.float32(2), "nan": math.nan, "list": listed, "long": "x" * 1000, "none": None}
    table = capture(table={"t": [row]}).tables[0]
    loss.zero_()
    listed.append(2)
    assert make_table(table).rows == ((0.5, 2.0, "nan", "[1]", "x" * 500, None),)


def test_memory_of_copies_is_used_again_and_not_while_they_wait() -> None:
    staging = Staging()
    staging.make_ready()
    large = torch.ones(400, 400)
    first, other = capture(images={"x": large}, staging=staging), capture(images={"x": large * 2}, staging=staging)
    assert first.buffer is not None and other.buffer is not None
    assert first.buffer.data_ptr() != other.buffer.data_ptr()
    assert float(first.images[0].content.max()) == 1.0 and float(other.images[0].content.min()) == 2.0
    staging.give_back(first.buffer)
    again = capture(images={"x": large * 3}, staging=staging)
    assert again.buffer is first.buffer


def test_copies_do_not_change_with_what_was_logged() -> None:
    weights, pixels = torch.ones(10), np.zeros((4, 4), np.uint8)
    captured = capture(images={"p": pixels}, histogram={"w": weights})
    weights.zero_()
    pixels[:] = 255
    assert make_histogram(captured.tensors[0]).mean == 1.0
    assert _pixels_of(encode_image(captured.images[0])[0]).max() == 0


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"images": {"no name": np.zeros((2, 2))}}, "'no name' is not a name"),
        ({"images": {"x": np.zeros((2, 2, 7))}}, "1, 3 or 4 channels"),
        ({"images": {"x": 3}}, "must be an array"),
        ({"histogram": {"x": torch.zeros(3, dtype=torch.complex64)}}, "complex, sparse or quantized"),
        ({"table": {"x": [{"a": 1}, [2]]}}, "all mappings or all lists"),
        ({"text": {"x": 3}}, "must be a str"),
    ],
)
def test_a_value_that_cannot_be_logged_is_refused_by_its_name(values: dict[str, object], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        capture(**values)  # type: ignore[arg-type]


def _pixels_of(data: bytes) -> np.ndarray:
    """Reads what `png` writes: no filters, one chunk."""
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    start = data.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(data[start:]), np.uint8).reshape(height, 1 + width * channels)
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_file_has_the_pixels_and_pil_reads_it(channels: int, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    (tmp_path / "x.png").write_bytes(encode_png(pixels))
    assert np.array_equal(np.asarray(image.open(tmp_path / "x.png")).reshape(5, 7, channels), pixels)
    with image.open(tmp_path / "x.png") as undecoded, image.open(tmp_path / "x.png") as decoded:
        decoded.load()
        images = capture(images={"decoded": decoded, "undecoded": undecoded, "path": tmp_path / "x.png"}).images
    assert np.array_equal(_pixels_of(encode_image(images[0])[0])[:, :, :channels][:, :, :1], pixels[:, :, :1])
    assert [encode_image(image)[0] for image in images[1:]] == [(tmp_path / "x.png").read_bytes()] * 2


def test_a_file_that_a_browser_could_run_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text("<svg onload='alert(1)'/>")
    with pytest.raises(ValueError, match="no PNG, JPEG, GIF or WebP"):
        encode_image(capture(images={"x": str(tmp_path / "x.svg")}).images[0])


def test_a_histogram_counts_what_is_finite() -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 4.0, float("nan"), float("inf")])
    bins = make_histogram(capture(histogram={"x": values}).tensors[0])
    assert (bins.low, bins.high, sum(bins.counts), bins.num_not_finite) == (0.0, 4.0, 4, 2)
    assert make_histogram(capture(histogram={"x": torch.ones(5)}).tensors[0]).counts == (5,)
    assert make_histogram(capture(histogram={"x": torch.tensor([float("nan")])}).tensors[0]).counts == ()


class Place:
    """A recorder that writes below a directory."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.folder, self.said = root / FOLDER, list[str]()
        self.recorder = Recorder(str(root), MediaSpec.model_validate(settings), say=self.said.append)
        self.is_fenced = False

    def begin(self, generation: int = 1, rank: int = 0) -> None:
        self.recorder.begin(attempt=1, generation=generation, rank=rank, is_fenced=lambda: self.is_fenced)

    def log(self, step: int, words: str = "x") -> None:
        self.recorder.log(step, text={"words": words})

    def stored(self) -> list[MediaRecord]:
        names = counted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        return [MediaRecord.model_validate_json((self.folder / str(name)).read_text()) for name in names]


def test_the_newest_generation_of_a_step_counts_and_the_older_is_deleted(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for generation in (1, 2):
        place.begin(generation)
        place.log(7, f"of {generation}")
        place.recorder.end(within_s=30)
    assert [record.texts[0].text for record in place.stored()] == ["of 2"]
    assert len(list(place.folder.iterdir())) == 1
    late = RecordName(7, 1, 1, 0, 1)
    assert counted([str(late), str(RecordName(7, 1, 2, 0, 1))]) == [RecordName(7, 1, 2, 0, 1)]


def test_a_fenced_generation_writes_nothing_more(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.begin()
    place.is_fenced = True
    place.log(1)
    place.recorder.end(within_s=30)
    assert place.stored() == []


def test_only_the_first_rank_is_kept_unless_all_are_wanted(tmp_path: Path) -> None:
    for ranks, expected in ((MediaRanks.FIRST, 0), (MediaRanks.ALL, 1)):
        place = Place(tmp_path / ranks, ranks=ranks)
        place.begin(rank=3)
        place.log(1)
        place.recorder.end(within_s=30)
        assert [record.rank for record in place.stored()] == [3] * expected


def test_steps_beyond_the_limit_are_thinned_out_and_the_first_and_newest_stay(tmp_path: Path) -> None:
    place = Place(tmp_path, max_steps=8)
    place.begin()
    for step in range(1, 41):
        place.log(step)
        place.recorder.end(within_s=30)
        place.begin()
    steps = [record.step for record in place.stored()]
    assert len(steps) <= 8 and steps[0] == 1 and steps[-3:] == [38, 39, 40]
    assert thinned_out(range(1, 9)) == [2, 4]


def test_what_comes_faster_than_the_storage_takes_it_is_dropped_counted_and_said(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.begin()
    for _ in range(30):
        place.log(1)
    place.recorder.end(within_s=30)
    place.begin(2)
    place.log(2)
    place.recorder.end(within_s=30)
    records = place.stored()
    assert len([record for record in records if record.step == 1]) == 16
    assert sum(record.dropped for record in records) == 14
    assert ["more than 16 calls in one step" in line for line in place.said] == [True]


def test_a_storage_that_cannot_be_written_costs_the_media_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    place = Place(tmp_path)
    place.begin()
    place.log(1)
    place.recorder.end(within_s=30)
    assert len(place.said) == 1 and "could not be stored" in place.said[0]


def test_records_over_a_whole_run_are_those_of_evenly_spaced_steps_with_all_their_calls() -> None:
    names = [RecordName(step, 1, 1, 0, number) for step in range(10, 110) for number in (1, 2)]
    kept = spread(names, 20)
    assert [name.step for name in kept] == [step for step in range(10, 110, 11) for _ in (1, 2)]
    assert (kept[0], kept[-1]) == (names[0], names[-1])
    assert spread(names, 200) == names and spread([], 5) == []
    assert spread(names, 1) == [names[-1]]
