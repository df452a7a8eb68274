"""A preview of the training data for people: samples with the tokens in the loss, labels, lengths, what is left out.

`shoal data show` prints the preview. Rank 0 of a job stores it before the first step, as DATA_FILE in the folder of the
job's media; the service reads it for the page. Pure data; engine/step/data_preview.py makes it.
"""

from __future__ import annotations

from pydantic import Field

from shoal_workers.contract.base import Frozen

DATA_FILE = "data.json"
MAX_FILE_BYTES = 2 << 20
"""Longest DATA_FILE that the service reads. A limit, because the code of a job can write anything there."""
MAX_LABELS = 50


class TextPreview(Frozen):
    """A text of a sample."""

    title: str
    """Role of the text in the sample, such as "chosen"; empty if the sample has no other text."""
    spans: tuple[tuple[str, bool], ...]
    """Pieces of the text, and true if their tokens are in the loss."""
    in_loss: int
    """Tokens in the loss."""
    left_out_chars: int = 0
    """Characters that follow the spans and are not shown."""


class SamplePreview(Frozen):
    """A sample as it arrives at the model."""

    texts: tuple[TextPreview, ...]
    tokens: int
    in_loss: int
    """Tokens in the loss."""
    label: str | None = None
    """Name or number of its class; null if it has none."""
    drawn: str = ""
    """Its image in letters, for a terminal."""
    png: str = Field("", pattern="^[A-Za-z0-9+/]*=*$")
    """A small copy of its image, as a PNG file in base64; empty if it is no image."""


class SplitPreview(Frozen):
    """A split of the data."""

    samples: int
    validated: int | None
    """Samples that each validation reads; null for the training split."""
    left_out: dict[str, int]
    """Numbers of samples that are not read, by reason."""
    num_cut: int
    """Samples that are cut at `model.seq_len`."""
    num_labels: int
    labels: dict[str, float]
    """Shares of the most frequent labels, by name or number."""
    num_counted: int = 0
    """Samples whose tokens were counted, the first that are read."""
    tokens: tuple[int, int, int] = (0, 0, 0)
    """Tokens of a sample: least, median, most."""
    in_loss: tuple[int, int, int] = (0, 0, 0)
    """Tokens in the loss of a sample: least, median, most."""
    num_few: int = 0
    """Texts with one token in the loss."""
    rows: tuple[SamplePreview, ...] = ()
    """The first samples, in the order in which they are read."""


class DataPreview(Frozen):
    """What training reads of a spec's data."""

    task: str = ""
    remarks: tuple[str, ...] = ()
    """What is probably not meant."""
    splits: dict[str, SplitPreview | None] = Field(default_factory=dict)
    """Splits by name, "train" and "validation". The latter is null if the job does not validate. Empty if unknown."""
