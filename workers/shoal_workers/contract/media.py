"""Media of a job (images, histograms, tables, texts): the records in its directory, and the choice of those that count.

    <checkpoint.url>/<job id>/media/
        step-000000000120-a1-g3-r0-n1.json          a MediaRecord: what one call has logged
        step-000000000120-a1-g3-r0-n1-i0.png        an image of it, written before the record

The name of a record has attempt and generation, so a rank that still runs in an old generation never replaces a record
of a newer one; a reader takes the newest generation of each step and rank (`counted`). Pure data: the engine writes
records (engine/media), the service reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen

FOLDER = "media"
"""Folder of the records, beside the checkpoints of the job."""
MAX_CALLS = 16
"""Calls of one rank in one step that are kept."""
MAX_IMAGES = 16
"""Images of one call that are kept."""
MAX_ITEMS = 16
"""Histograms, tables and texts of one call that are kept, of each kind."""
MAX_COPIED_BYTES = 768 << 10
"""Bytes of images that one call copies on the training thread; larger images are thinned out first."""
MAX_TOUCHED_LINES = 3 << 12
"""Cache lines of 64 bytes that one call reads of images. The values that remain of a thinned-out image are each in a
separate line, so the number of lines, not of bytes, says how long the copy takes."""
MAX_DEVICE_BYTES = 4 << 20
"""Bytes of images that one call copies on a GPU. There the training thread only starts a copy, whatever its size."""
MAX_SAMPLE = 1 << 15
"""Values of tensors that one call copies; the histograms of the call share them."""
MAX_LISTED = 1 << 12
"""Values of lists of numbers that one call takes; each is an object of Python."""
NUM_BINS = 64
MAX_CELLS = 1000
MAX_COLUMNS = 40
MAX_CELL_CHARS = 500
MAX_TEXT_CHARS = 20_000
MAX_FILE_BYTES = 4 << 20
"""Largest image file that is taken by its path, bytes."""
MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
"""Media type of an image by the suffix of its file. Formats that can contain programs, such as SVG, are not taken."""
IMAGE_FILE = re.compile(
    r"^step-[0-9]{12,19}-a[0-9]{1,9}-g[0-9]{1,18}-r[0-9]{1,8}-n[0-9]{1,4}-i[0-9]{1,4}\.(png|jpg|gif|webp)$"
)
_RECORD = re.compile(r"step-(\d{12,19})-a(\d{1,9})-g(\d{1,18})-r(\d{1,8})-n(\d{1,4})\.json", re.ASCII)


class MediaRanks(StrEnum):
    FIRST = "first"
    ALL = "all"


class MediaSpec(Frozen):
    """Images, histograms, tables and texts that a task or loop logs; see docs/media.md."""

    enabled: bool = True
    """Keep what is logged. false: it is dropped without being copied."""
    ranks: MediaRanks = MediaRanks.FIRST
    """Keep what rank 0 logs, or what all ranks log."""
    max_steps: int = Field(500, ge=2, le=100_000)
    """Steps of each rank that are kept. If there are more, every second one of the older half is deleted."""
    max_bytes: int = Field(1 << 30, ge=1 << 20, le=2**53)
    """Bytes of each rank that are kept in the storage; beyond that, steps are deleted as for `max_steps`."""
    max_waiting_bytes: int = Field(32 << 20, ge=1 << 20, le=1 << 40)
    """Bytes in memory that may wait for the storage; what is logged beyond that is dropped and counted."""


@dataclass(frozen=True, slots=True, order=True)
class RecordName:
    """Name of a record's file; sorts by step, then by writer."""

    step: int
    attempt: int
    generation: int
    rank: int
    number: int
    """Number of the call among those of the step, from 1."""

    @property
    def stem(self) -> str:
        return f"step-{self.step:012d}-a{self.attempt}-g{self.generation}-r{self.rank}-n{self.number}"

    def __str__(self) -> str:
        return f"{self.stem}.json"

    def image(self, index: int, suffix: str) -> str:
        return f"{self.stem}-i{index}.{suffix}"

    @staticmethod
    def parse(name: str) -> RecordName | None:
        """Read the name of a file; None if it is not the name of a record."""
        match = _RECORD.fullmatch(name)
        parsed = RecordName(*(int(group) for group in match.groups())) if match else None
        return parsed if str(parsed) == name else None


def counted(names: Iterable[str]) -> list[RecordName]:
    """Return the records that count, in order: for each step and rank, those of the newest generation.

    A step that is repeated after a failure thus replaces what it logged before.
    """
    records = [parsed for name in names if (parsed := RecordName.parse(name)) is not None]
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    for record in records:
        key, writer = (record.step, record.rank), (record.attempt, record.generation)
        newest[key] = max(writer, newest.get(key, writer))
    return sorted(
        record for record in records if newest[record.step, record.rank] == (record.attempt, record.generation)
    )


def thinned_out(steps: Collection[int]) -> list[int]:
    """Return the steps to delete if there are too many: every second one of the older half, but not the first.

    The whole run stays visible, and the newest steps stay dense.
    """
    ordered = sorted(set(steps))
    return ordered[1 : max(2, len(ordered) // 2 + 1) : 2] if len(ordered) > 2 else ordered[:-1]


def spread(names: Sequence[RecordName], limit: int) -> list[RecordName]:
    """Choose at most `limit` records, all those of evenly spaced steps, the first and the newest step among them.

    If a single step has more records than `limit`, return its last ones.

    Args:
        names: in order.
    """
    by_step: dict[int, list[RecordName]] = {}
    for name in names:
        by_step.setdefault(name.step, []).append(name)
    steps = sorted(by_step)
    num_steps = min(len(steps), max(1, limit // max(map(len, by_step.values()), default=1)))
    chosen = (
        steps[-1:] if num_steps == 1 else [steps[i * (len(steps) - 1) // (num_steps - 1)] for i in range(num_steps)]
    )
    return [name for step in chosen for name in by_step[step]][-limit:]


class MediaImage(Frozen):
    name: str
    file: str = Field(pattern=IMAGE_FILE.pattern)
    bytes: int = Field(ge=0)
    width: int | None = None
    """None if the file was taken as it is."""
    height: int | None = None
    note: str = ""


class MediaHistogram(Frozen):
    name: str
    low: float
    high: float
    counts: tuple[int, ...] = Field(max_length=NUM_BINS)
    """Values in equally wide bins from `low` to `high`."""
    num_values: int
    """Values of the tensor (of this rank's part of it)."""
    num_sampled: int
    """Values that were looked at; fewer for a large tensor."""
    num_not_finite: int
    """How many of those are in no bin because they are infinite or not a number."""
    mean: float | None
    std: float | None


class MediaTable(Frozen):
    name: str
    columns: tuple[str, ...] = Field(max_length=MAX_COLUMNS)
    rows: tuple[tuple[str | bool | int | float | None, ...], ...]
    num_rows: int
    """Rows that were logged; more than `rows` if some were left out."""


class MediaText(Frozen):
    name: str
    text: str
    num_chars: int


class MediaRecord(Frozen):
    """What one call has logged."""

    step: int
    attempt: int
    generation: int
    rank: int
    at: float
    """Wall-clock time of the call, seconds since the epoch."""
    held_s: float
    """Seconds for which the call kept the training thread."""
    dropped: int = 0
    """Calls of this rank that were dropped since its last record, because the storage was slower than they came."""
    images: tuple[MediaImage, ...] = ()
    histograms: tuple[MediaHistogram, ...] = ()
    tables: tuple[MediaTable, ...] = ()
    texts: tuple[MediaText, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
