"""What the tasks share that train a model of transformers on lines with answers: the tokenizer, the tokens on disk, and
how samples become a batch.

Hides when the lines are tokenised, and where the tokenizer comes from. A task says what a line is (`encode`, with a
`kind` that names it) and makes samples of the examples. Base class of `SupervisedFineTuning` and
`DirectPreferenceOptimization`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from shoal_workers.contract.hugging_face import TOKENIZER_NAME, HuggingFaceConfig
from shoal_workers.contract.text_data import BYTE_TOKENIZER, ExamplesConfig
from shoal_workers.data.labelled import LabelledExamples
from shoal_workers.tasks.answers import Encode, padded_batch, prepare_examples
from shoal_workers.tasks.conversations import Encoder, load_encoder
from shoal_workers.tasks.hf import HuggingFaceModel


class ExamplesTask(HuggingFaceModel):
    """A model of transformers, and lines of text or of messages."""

    def __init__(self, settings: HuggingFaceConfig, lines: ExamplesConfig, encode: Encode, kind: str) -> None:
        super().__init__(settings)
        self.lines = lines
        self._encode = encode
        self._kind = kind
        self._directory = lines.tokenizer or settings.path or BYTE_TOKENIZER
        is_bytes = self._directory == BYTE_TOKENIZER
        self.tokenizer = BYTE_TOKENIZER if is_bytes else str(Path(self._directory).expanduser() / TOKENIZER_NAME)
        self._encoder: Encoder | None = None
        self._examples: LabelledExamples | None = None

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Tokenise the files, unless that was done before."""
        self._encoder = load_encoder(self._directory)
        self._examples = prepare_examples(self.lines, self._encoder, progress, self._encode, self._kind)

    def prepared(self) -> tuple[LabelledExamples, int]:
        """The examples, and the token that fills samples. DataError: the files cannot be read."""
        if self._examples is None:
            self.prepare(lambda _: None)
        assert self._examples is not None and self._encoder is not None
        return self._examples, self._encoder.padding

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pads samples of several lengths to the longest of them."""
        _, padding = self.prepared()
        return padded_batch(samples, padding)
