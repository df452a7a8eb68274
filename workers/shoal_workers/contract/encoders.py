"""Settings of the tasks for models of transformers that are no causal language models: encoders, and encoders with a
decoder.

    masked language models    BERT, RoBERTa, ModernBERT    text, as of the built-in language model
    sequence to sequence      T5, BART                     pairs of texts
    classifiers of texts      BERT, RoBERTa, ModernBERT    texts with labels
    classifiers of images     ViT, ResNet                  directories of images, or rows with images and labels
    speech to text            Whisper                      rows with audio and transcripts

Each task has a model and a data section here. Rows are read as `data/records.py` says. Such a model is split along the
data axes alone, unless the spec has a `plan`. Pure data; the tasks are in `shoal_workers.tasks`. Called by the submit
check, the planner, and the tasks.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.hugging_face import HF_TASKS, PretrainedConfig, hugging_face_of
from shoal_workers.contract.text_data import BadRows, TextDataConfig, TextFormat

MASKED_TASK = "shoal_workers.tasks.masked_lm:MaskedLanguageModel"
SEQ2SEQ_TASK = "shoal_workers.tasks.seq2seq:SequenceToSequence"
TEXT_CLASS_TASK = "shoal_workers.tasks.text_classification:TextClassification"
IMAGE_CLASS_TASK = "shoal_workers.tasks.image_classification:ImageClassification"
SPEECH_TASK = "shoal_workers.tasks.speech:SpeechToText"


class MaskedModelConfig(PretrainedConfig):
    """A masked language model: BERT, RoBERTa, ModernBERT and the others that AutoModelForMaskedLM knows."""

    seq_len: int = Field(256, ge=4, le=1 << 22)
    """Tokens per sample, with those that begin and end it."""


class Seq2SeqModelConfig(PretrainedConfig):
    """An encoder with a decoder: T5, BART and the others that AutoModelForSeq2SeqLM knows."""

    seq_len: int = Field(256, ge=2, le=1 << 22)
    """Tokens of a source; a longer one is cut, a shorter one padded."""
    target_len: int = Field(128, ge=2, le=1 << 22)
    """Tokens of a target; a longer one is cut, a shorter one padded."""


class ClassifierConfig(PretrainedConfig):
    """A model with a head for classes."""

    num_labels: int | None = Field(None, ge=2, le=1 << 24)
    """Number of classes; null: as the config says. If the files in `path` have a head for another number, the head of
    the new model is random."""


class TextClassModelConfig(ClassifierConfig):
    """A classifier of texts, any that AutoModelForSequenceClassification knows."""

    seq_len: int = Field(256, ge=2, le=1 << 22)
    """Tokens of a text; a longer one is cut, a shorter one padded."""


class ImageClassModelConfig(ClassifierConfig):
    """A classifier of images: ViT, ResNet and the others that AutoModelForImageClassification knows."""


class SpeechModelConfig(PretrainedConfig):
    """A model from speech to text: Whisper, and the others of AutoModelForSpeechSeq2Seq that read log-mel features."""

    target_len: int = Field(128, ge=2, le=1 << 22)
    """Tokens of a transcript; a longer one is cut, a shorter one padded."""


class MaskedTextConfig(TextDataConfig):
    """Text as for the built-in language model, with some of the tokens hidden (Devlin et al. 2018)."""

    mask_fraction: float = Field(0.15, gt=0, lt=1)
    """Fraction of a sample's tokens that the model predicts: of these 80 % are replaced by the mask token, 10 % by a
    random one, and 10 % stay."""
    mask_token: str | None = Field(None, min_length=1, max_length=255)
    """The mask token, as the tokenizer's vocabulary has it. Null: `[MASK]` or `<mask>`. Bytes have one more token, 257,
    in any case."""


class RowsConfig(Frozen):
    """Examples in rows of files."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files of rows, globs and directories (read recursively), as paths or URLs. Every node must be able to read
    them."""
    validation_paths: tuple[str, ...] = Field((), max_length=10_000)
    """Files of the validation split. Without any, `validation_fraction` of the rows are taken for it."""
    validation_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the rows for validation only, chosen by their hash."""
    format: TextFormat = TextFormat.AUTO
    """"auto": by the name of each file, as for text. Rows are JSON lines, Parquet, Arrow or CSV."""
    bad_rows: BadRows = BadRows.REFUSE
    """A row that cannot be read or lacks a field: "refuse" ends the preparation with its file and number, "skip"
    leaves it out."""
    max_examples: int | None = Field(None, ge=1)
    """Most rows of the training and of the validation files to read, in order; default: all."""
    cache_dir: str | None = Field(None, max_length=4096)
    """Where the examples are kept once they are read. Default: ~/.cache/shoal/data."""


class PairsConfig(RowsConfig):
    """Pairs of texts: the loss is over the tokens of the targets."""

    source_field: str = Field("source", min_length=1, max_length=1024)
    """Where the source stands in a row: a column, or a path such as `translation.en`."""
    target_field: str = Field("target", min_length=1, max_length=1024)
    """Where the target stands in a row."""
    prefix: str = Field("", max_length=4096)
    """Text before each source, for example "summarize: "."""
    tokenizer: str | None = Field(None, max_length=4096)
    """Path of a tokenizers JSON file, or "bytes"; null: that in model.path, else bytes."""


class LabelledTextConfig(RowsConfig):
    """Texts with labels."""

    text_field: str = Field("text", min_length=1, max_length=1024)
    """Where the text stands in a row: a column, or a path such as `review.text`."""
    label_field: str = Field("label", min_length=1, max_length=1024)
    """Where the label stands in a row: the number of its class, from 0 on, or the name of its class."""
    classes: tuple[str, ...] = Field((), max_length=1 << 20)
    """Names of the classes, in the order of their numbers. Without any, the names in the model's config."""
    tokenizer: str | None = Field(None, max_length=4096)
    """Path of a tokenizers JSON file, or "bytes"; null: that in model.path, else bytes."""


class ImagesConfig(RowsConfig):
    """Images with labels: a directory of directories, one for each class, or rows."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["folder"], "properties": {"folder": {"type": "string"}, "paths": {"maxItems": 0}}},
                {
                    "required": ["paths"],
                    "properties": {"folder": {"type": "null"}, "paths": {"minItems": 1}},
                },
            ]
        }
    )

    folder: str | None = Field(None, min_length=1, max_length=4096)
    """Directory with one directory for each class, which has its images. Every node must be able to read it."""
    validation_folder: str | None = Field(None, min_length=1, max_length=4096)
    """The same of the validation split. Without one, `validation_fraction` of the images are taken for it."""
    paths: tuple[str, ...] = Field((), max_length=10_000)
    """Files of rows, globs and directories (read recursively), as paths or URLs. Every node must be able to read
    them."""
    image_field: str = Field("image", min_length=1, max_length=1024)
    """Where the image stands in a row: the content of a file, or an object with it in `bytes`, as `datasets` writes
    it."""
    label_field: str = Field("label", min_length=1, max_length=1024)
    """Where the label stands in a row: the number of its class, from 0 on, or the name of its class."""
    classes: tuple[str, ...] = Field((), max_length=1 << 20)
    """Names of the classes, in the order of their numbers. Without any, the names of the directories in `folder`, in
    order; for rows those in the model's config."""
    flip: bool = False
    """In training, mirror every second image, chosen by the seed and its position in the run."""

    @model_validator(mode="after")
    def _one_place(self) -> ImagesConfig:
        if (self.folder is None) == (not self.paths):
            raise ValueError("data must contain exactly one of folder (a directory for each class) and paths (rows).")
        if self.validation_folder is not None and self.folder is None:
            raise ValueError("data.validation_folder belongs to data.folder. With rows set data.validation_paths.")
        if self.validation_paths and self.folder is not None:
            raise ValueError("data.validation_paths belongs to data.paths. With folder set data.validation_folder.")
        return self


class SpeechConfig(RowsConfig):
    """Audio with transcripts: the loss is over the tokens of the transcripts."""

    audio_field: str = Field("audio", min_length=1, max_length=1024)
    """Where the audio stands in a row: the path of a WAV file (relative to the file of rows), the content of one, a
    list of samples between -1 and 1, or an object with one of these in `bytes`, `array` or `path`."""
    text_field: str = Field("text", min_length=1, max_length=1024)
    """Where the transcript stands in a row."""
    tokenizer: str | None = Field(None, max_length=4096)
    """Path of a tokenizers JSON file, or "bytes"; null: that in model.path, else bytes."""


SECTIONS: dict[str, tuple[type[PretrainedConfig], type[Frozen]]] = {
    MASKED_TASK: (MaskedModelConfig, MaskedTextConfig),
    SEQ2SEQ_TASK: (Seq2SeqModelConfig, PairsConfig),
    TEXT_CLASS_TASK: (TextClassModelConfig, LabelledTextConfig),
    IMAGE_CLASS_TASK: (ImageClassModelConfig, ImagesConfig),
    SPEECH_TASK: (SpeechModelConfig, SpeechConfig),
}
"""Task -> its sections `model` and `data`."""
PRETRAINED_TASKS = (*HF_TASKS, *SECTIONS)
"""The tasks whose model is one of transformers."""


def pretrained_of(task: str, model: dict[str, Any]) -> PretrainedConfig | None:
    """Settings of a model of transformers; None for another task, and for invalid settings, which the submit check
    refuses."""
    if task not in SECTIONS:
        return hugging_face_of(task, model)
    try:
        return SECTIONS[task][0].model_validate(model)
    except ValidationError:
        return None
