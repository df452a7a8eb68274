"""The data sections of a spec for the tasks that read text, and the model sections of those for models of transformers
that are no causal language models: encoders, and encoders with a decoder.

    TextDataConfig       a corpus, files, or a mixture of sources, as token shards: language models
    AnswersConfig        prompts with answers, or conversations: fine-tuning
    PreferencesConfig    prompts with a chosen and a rejected answer: direct preference optimization

Which settings go together is decided here; `shoal_workers.data` reads the files.

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

from collections import Counter
from enum import StrEnum
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from shoal_workers.contract.base import Frozen, exactly_one_of
from shoal_workers.contract.hugging_face import HF_TASK, HF_TASKS, PretrainedConfig, hugging_face_of
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.mixture_weights import MAX_CHANGED_WEIGHTS, InForce, WeightChange
from shoal_workers.contract.rules import Rule, Section

TEXT_TASKS = (LM_TASK, HF_TASK)
"""The tasks whose data is a `TextDataConfig`."""
STDLIB_CORPUS = "python-stdlib"
BYTE_TOKENIZER = "bytes"
BYTE_VOCABULARY = 257
"""Size of the byte tokenizer's vocabulary: one token per byte, and one that ends a document."""


class TextFormat(StrEnum):
    """How the text stands in a file."""

    AUTO = "auto"
    """Decided for each file by its name."""
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"


class BadRows(StrEnum):
    """What happens to a row that has no text in its field."""

    REFUSE = "refuse"
    SKIP = "skip"


class TextSource(Frozen):
    """A part of a mixture."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("weight", "epochs"))

    path: str = Field(min_length=1, max_length=4096)
    """A file, glob, directory or URL, as in `paths`."""
    name: str | None = Field(None, min_length=1, max_length=63)
    """What changes of the weights call it; its path if it has no name."""
    weight: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Its share of the samples, relative to the weights of the others. All sources have a weight, or all have
    epochs."""
    epochs: float | None = Field(None, gt=0, le=1e6, allow_inf_nan=False)
    """How often it is read while the whole mixture is read once (`stop: {epochs: 1}`)."""
    field: str | None = Field(None, min_length=1, max_length=1024)
    """As `data.field`, which is its default."""
    format: TextFormat | None = None
    """As `data.format`, which is its default."""

    @property
    def key(self) -> str:
        return self.name if self.name is not None else self.path


class TextDataConfig(Section):
    """Text as token shards on local disk, prepared once per node and memory-mapped."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["corpus"],
                    "properties": {
                        "corpus": {"const": STDLIB_CORPUS},
                        "paths": {"maxItems": 0},
                        "sources": {"maxItems": 0},
                        "changes": {"maxItems": 0},
                    },
                },
                {
                    "required": ["paths"],
                    "properties": {
                        "corpus": {"type": "null"},
                        "paths": {"minItems": 1},
                        "sources": {"maxItems": 0},
                        "changes": {"maxItems": 0},
                    },
                },
                {
                    "required": ["sources"],
                    "properties": {"corpus": {"type": "null"}, "paths": {"maxItems": 0}, "sources": {"minItems": 1}},
                },
            ]
        }
    )

    corpus: str | None = Field(None, max_length=255)
    """A corpus by name: "python-stdlib", the running interpreter's own standard library."""
    paths: tuple[str, ...] = Field((), max_length=10_000)
    """Text files, globs and directories (read recursively), as paths or URLs (`s3://`, `https://` ...). Every node must
    be able to read them."""
    sources: tuple[TextSource, ...] = Field((), max_length=1000)
    """A mixture: [{path, weight}, ...] or [{path, epochs}, ...]. The order of its samples depends on the seed and the
    step alone, and each source has exactly its share."""
    changes: tuple[WeightChange, ...] = Field((), max_length=MAX_CHANGED_WEIGHTS)
    """Other weights from steps on: [{at_step: 500, weights: {web: 0.5, chats: 0.5}}, ...], in the order of their steps.
    `PATCH /v1/jobs/{id}` and `shoal update --weights` add to them while the job trains."""
    format: TextFormat = TextFormat.AUTO
    """"auto": by the name of each file, `.jsonl`, `.ndjson`, `.parquet`, `.arrow`, `.feather`, `.csv`, `.tsv`, and text
    for any other; all but Parquet and Arrow also with `.gz` or `.zst` behind it. Otherwise all files have this
    format."""
    field: str = Field("text", min_length=1, max_length=1024)
    """Where the text stands in a row of JSON lines, Parquet, Arrow and CSV: a column, or a path such as
    `message.content` or `turns.0.text`."""
    bad_rows: BadRows = BadRows.REFUSE
    """A row that cannot be read or has no text in `field`: "refuse" ends the preparation with its file and number,
    "skip" leaves it out and counts it."""
    tokenizer: str = Field(BYTE_TOKENIZER, max_length=4096)
    """"bytes": one token per byte, plus one that ends a document. Or the path of a tokenizers JSON file."""
    validation_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the documents for validation only, chosen by the hash of their text."""
    max_bytes: int | None = Field(None, ge=1)
    """Maximum number of bytes of text to read (whole documents, in order of their paths); default: all."""
    cache_dir: str | None = Field(None, max_length=4096)
    """Where token shards are kept. Default: ~/.cache/shoal/data."""
    encoding_errors: Literal["strict", "replace"] = "replace"
    """Bytes that are not UTF-8: "strict" refuses the file, "replace" reads U+FFFD instead."""

    rules = (
        Rule(
            lambda data: (data.corpus is not None) + bool(data.paths) + bool(data.sources) != 1,
            'data must contain exactly one of corpus, paths and sources, for example data: {corpus: "python-stdlib"}.',
        ),
        Rule(
            lambda data: sorted([data.num_with("weight"), data.num_with("epochs")]) != [0, len(data.sources)],
            lambda data: (
                f"of the {len(data.sources)} entries of data.sources {data.num_with('weight')} have a weight "
                f"and {data.num_with('epochs')} epochs. Give each of them a weight, or each of them epochs."
            ),
        ),
        Rule(
            lambda data: data.changes and not data.sources,
            "data.changes is set, and data.sources is not: only the weights of a mixture change.",
        ),
        Rule(
            lambda data: data.changes and len(set(data.keys)) < len(data.keys),
            lambda data: (
                f"two entries of data.sources are called {Counter(data.keys).most_common(1)[0][0]!r}, so "
                "data.changes cannot name them. Give each a name."
            ),
        ),
        Rule(lambda data: data.describe_wrong_change(), lambda data: data.describe_wrong_change()),
        Rule(
            lambda data: len(data.keys) * len(data.changes) > MAX_CHANGED_WEIGHTS,
            lambda data: (
                f"data.changes has {len(data.changes)} changes of {len(data.keys)} weights each; "
                f"{MAX_CHANGED_WEIGHTS:,} weights are allowed in all, because every checkpoint contains them."
            ),
        ),
        Rule(
            lambda data: data.corpus not in (None, STDLIB_CORPUS),
            lambda data: f'data.corpus {data.corpus!r} is not known; the only named corpus is "{STDLIB_CORPUS}".',
        ),
    )

    @property
    def keys(self) -> list[str]:
        """What changes call the sources."""
        return [source.key for source in self.sources]

    def num_with(self, key: str) -> int:
        """Count the sources that have this key."""
        return sum(getattr(source, key) is not None for source in self.sources)

    def describe_wrong_change(self) -> str:
        """Describe the first change that does not fit the sources or the change before it; empty if all do."""
        for number, change in enumerate(self.changes):
            where = f"data.changes[{number}]"
            if set(change.weights) != set(self.keys):
                return (
                    f"{where}.weights names {', '.join(map(repr, change.weights))}, and the sources are "
                    f"{', '.join(map(repr, self.keys))}. Name each of them; 0 leaves one out."
                )
            if not any(change.weights.values()):
                return f"{where}.weights are all 0. Give one source a weight."
            before = self.changes[number - 1].at_step if number else 0
            if change.at_step <= before:
                return f"{where}.at_step {change.at_step} is not after that of the change before it, {before}."
        return ""

    @property
    def wanted_weights(self) -> tuple[InForce, ...]:
        """The changes, with the weights in the order of the sources."""
        return tuple(
            InForce(change.at_step, tuple(change.weights[source.key] for source in self.sources))
            for change in self.changes
        )

    def of_each_source(self) -> list[TextDataConfig]:
        """Return the settings of each source alone; without a mixture: these."""
        if not self.sources:
            return [self]
        shared = self.model_dump(exclude={"sources", "changes", "paths", "field", "format"})
        return [
            TextDataConfig(
                **shared, paths=(source.path,), field=source.field or self.field, format=source.format or self.format
            )
            for source in self.sources
        ]


class ExamplesConfig(Frozen):
    """Examples as JSON lines: what all tasks that learn from answers have in their data section."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs: a JSON object in each line, or rows of Parquet, Arrow and CSV. Every node must be able to read
    them."""
    validation_paths: tuple[str, ...] = Field((), max_length=10_000)
    """Files of the validation split. Without any, `validation_fraction` of the lines are taken for it."""
    validation_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the lines for validation only, chosen by their hash."""
    max_examples: int | None = Field(None, ge=1)
    """Most lines of the training and of the validation files to read, in order; default: all."""
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    """Samples of similar length share a micro-batch, as many as fit into this number of tokens with their padding; then
    `batch.micro_size` is 1, and the batch, epochs and `validation.samples` count micro-batches. Null: every sample is
    padded to model.seq_len."""
    tokenizer: str | None = Field(None, max_length=4096)
    """Directory with a tokenizer and its chat template; null: model.path. "bytes": one token per byte, for prompts and
    answers that are texts."""
    cache_dir: str | None = Field(None, max_length=4096)
    """Where the tokens are kept. Default: ~/.cache/shoal/data."""


class AnswersConfig(ExamplesConfig):
    """Prompts with answers, or conversations, as JSON lines: the loss is over the tokens of the answers."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs. A JSON object in each line, or a row of Parquet, Arrow or CSV: {"prompt": text, "completion":
    text}, {"messages": [{"role": ..., "content": ...}, ...]}, or prompt and completion as lists of messages. Every node
    must be able to read them."""
    packing: bool = False
    """Several examples in one sample, which do not see each other. Otherwise a sample has one example, and padding."""


class PreferencesConfig(ExamplesConfig):
    """Prompts with a chosen and a rejected answer, as JSON lines."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs. A JSON object in each line, or a row of Parquet, Arrow or CSV: {"prompt": text, "chosen": text,
    "rejected": text}, or all three as lists of messages; without prompt it is what both answers begin with. Every node
    must be able to read them."""


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


class RowsConfig(Section):
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

    rules = (
        Rule(
            lambda data: (data.folder is None) == (not data.paths),
            "data must contain exactly one of folder (a directory for each class) and paths (rows).",
        ),
        Rule(
            lambda data: data.validation_folder is not None and data.folder is None,
            "data.validation_folder belongs to data.folder. With rows set data.validation_paths.",
        ),
        Rule(
            lambda data: data.validation_paths and data.folder is not None,
            "data.validation_paths belongs to data.paths. With folder set data.validation_folder.",
        ),
    )


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
