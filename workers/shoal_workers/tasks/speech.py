"""The task that trains a model of transformers from speech to text (Whisper) on audio with transcripts.

    task: shoal_workers.tasks.speech:SpeechToText
    model: {path: /models/tiny-whisper, target_len: 128}
    data: {paths: [/speech/*.jsonl]}                       {"audio": "clips/1.wav", "text": transcript}

The log-mel features are those of the model's own feature extractor (preprocessor_config.json), computed when a sample
is read. Tokens of a transcript are those of the tokenizer with its prompt, so a tokenizer that is saved for a language
trains it. Loaded by the engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from shoal_workers.contract.hugging_face import config_of
from shoal_workers.contract.text_data import SpeechConfig, SpeechModelConfig
from shoal_workers.data.audio import decode_audio, store_audio
from shoal_workers.data.labelled import Labelled, prepare_rows
from shoal_workers.data.records import Record
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer
from shoal_workers.tasks.rows import NO_LABEL, RowSamples, padded, read_tokens
from shoal_workers.tasks.seq2seq import DecoderTask

_EXTRACTOR = "preprocessor_config.json"
_POSITIONS_PER_S = 50
"""Whisper's encoder has a frame each 10 ms, and two frames become one position."""


class SpeechToText(DecoderTask):
    """Transcripts of audio."""

    auto_class = "AutoModelForSpeechSeq2Seq"
    exported_files = (_EXTRACTOR, "processor_config.json", "generation_config.json", "normalizer.json")

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = SpeechModelConfig.model_validate(model)
        super().__init__(self.settings)
        self.speech = SpeechConfig.model_validate(data)
        self.tokenizer = self.speech.tokenizer or self.own_tokenizer()

    @property
    def tokens_per_sample(self) -> int:
        return self.settings.target_len

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Check the audio and tokenise the transcripts, unless that was done before."""
        tokenizer, extractor = load_tokenizer(self.tokenizer), self.extractor()
        rate, most_s = int(extractor.sampling_rate), float(extractor.chunk_length)
        self._examples = prepare_rows(
            self.speech,
            (self.speech.audio_field, self.speech.text_field),
            "speech",
            [tokenizer.fingerprint, self.settings.target_len, rate, most_s, self._start()],
            lambda record: self._encoded(record, tokenizer, rate, most_s),
            progress,
        )

    def _encoded(self, record: Record, tokenizer: Tokenizer, rate: int, most_s: float) -> Labelled:
        # The decoder reads the first token of the prompt before any label.
        labels = read_tokens(record.values[1], record.place, "text_field", tokenizer, self.settings.target_len + 1)
        labels = labels[1:] if labels[0] == self._start() else labels[: self.settings.target_len]
        return Labelled(store_audio(record.values[0], record.file, rate, most_s, record.place), labels)

    def _start(self) -> int | None:
        value = config_of(self.settings).get("decoder_start_token_id")
        return value if isinstance(value, int) else None

    def build_dataset(self, split: str) -> RowSamples:
        """Samples: `features` (mel bins, frames), `labels` (target_len,); "train" or "validation".

        Raises:
            DataError: the files cannot be read, or have no sample for training.
        """
        extractor = self.extractor()

        def read(payload: bytes, labels: NDArray[Any]) -> dict[str, Tensor]:
            rate = int(extractor.sampling_rate)
            audio = decode_audio(payload, rate, "audio of data.paths")
            features = extractor(audio, sampling_rate=rate, return_tensors="pt")["input_features"][0]
            return {"features": features, "labels": padded(labels, self.settings.target_len, NO_LABEL)}

        return RowSamples(self.examples(), split, read, extractor.to_json_string())

    def extractor(self) -> Any:
        """Return the feature extractor of transformers.

        Raises:
            ImportError: the extra `hf` is not installed.
            ValueError: it makes no log-mel features, or the model reads no whole number of seconds.
        """
        try:
            from transformers import AutoFeatureExtractor, WhisperFeatureExtractor
        except ImportError as error:
            raise ImportError(f"task SpeechToText needs transformers ({error}): pip install 'shoal[hf]'.") from error
        if _EXTRACTOR in self.files_beside((_EXTRACTOR,)):
            directory = Path(self.settings.path or "").expanduser()
            loaded = AutoFeatureExtractor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            if not isinstance(loaded, WhisperFeatureExtractor):
                raise ValueError(
                    f"model.path {self.settings.path!r} has the feature extractor {type(loaded).__name__}, and this "
                    "task knows that of Whisper, WhisperFeatureExtractor."
                )
            return loaded
        config = config_of(self.settings)
        positions, bins = config.get("max_source_positions", 1500), config.get("num_mel_bins", 80)
        if positions % _POSITIONS_PER_S:
            raise ValueError(
                f"the model's config has max_source_positions {positions}, {positions / _POSITIONS_PER_S:g} s. "
                f"Set it to a multiple of {_POSITIONS_PER_S}."
            )
        return WhisperFeatureExtractor(feature_size=bins, chunk_length=positions // _POSITIONS_PER_S)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `cross_entropy`: a step's loss is the mean over all tokens of transcripts in it."""
        return self.cross_entropy(model, batch["labels"], input_features=batch["features"])
