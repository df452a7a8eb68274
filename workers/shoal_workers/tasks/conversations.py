"""Prompts with answers, conversations and preferences, from JSON lines or rows of Parquet to tokens with a mask of
those that are answers.

    {"prompt": text, "completion": text}           the text of both, and the token that ends a text; the completion and
                                                   the end are the answer
    {"messages": [{"role", "content"}, ...]}       what the chat template makes of them; each turn of the assistant is
                                                   an answer, without the words before it that ask for one
    {"prompt": messages, "completion": messages}   the same, but the turns of the prompt are no answers
    {"prompt", "chosen", "rejected"}               a preference: two completions of one prompt, as above. Without prompt
                                                   it is what both begin with

A template that marks answers itself ({% generation %}) is believed. Of another one, the text before and after each
answer is rendered, and the answer is what has been added: this requires that a turn is rendered in the same way
whatever follows, and is refused where it is not. The text is tokenised once, as a whole, so that tokens are those of a
model that answers; a token is part of an answer if it begins in it.

Called by the tasks, in their preparation. Only this module knows what a line may contain.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from shoal_workers.contract.hugging_face import TOKENIZER_NAME
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY
from shoal_workers.data.errors import DataError, MissingTextError, TokenizerError

_ANSWERING = "assistant"
_ROWS_PER_BATCH = 256
_MARKED = "{% generation %}"
_OF_TOKENIZER = (TOKENIZER_NAME, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


Text = str | list[Any]
"""A text, or messages."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer, or one conversation."""

    tokens: Sequence[int]
    is_answer: Sequence[bool]


class Encoder(Protocol):
    """Makes examples of lines."""

    @property
    def fingerprint(self) -> str:
        """Differs between encoders that may make different examples of the same line."""

    @property
    def padding(self) -> int:
        """A token that fills a sample; nothing is computed of it."""

    def example(self, prompt: Text, completion: Text, place: str) -> Example:
        """DataError: it cannot be encoded; `place` names the line."""


def files_of(paths: Sequence[str]) -> list[Path]:
    """Files of the paths and globs, in order. MissingTextError: there is none."""
    found = []
    for pattern in paths:
        name = str(Path(pattern).expanduser())
        matches = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not matches:
            raise MissingTextError(
                f"data.paths: {pattern!r} names no file on this node. Every node must be able to read it."
            )
        found += [Path(match) for match in matches]
    return list(dict.fromkeys(found))


def lines_of(files: Sequence[Path]) -> Iterator[tuple[bytes, str]]:
    """Each line that is not empty, and where it stands. A row of Parquet is the line with the same content."""
    for file in files:
        if file.suffix == ".parquet":
            yield from _rows_of(file)
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield line.strip(), f"{file}:{number}"


def _rows_of(file: Path) -> Iterator[tuple[bytes, str]]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(_ROWS_PER_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield json.dumps(row, default=str).encode(), f"{file}, row {number}"
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}. Write the file again.") from error


def answer_of(encoder: Encoder, line: bytes, place: str) -> tuple[Example]:
    """DataError: the line has none of the forms of an answer; `place` names it."""
    record = _parsed(line, place)
    if _are_messages(record.get("messages")):
        return (encoder.example([], record["messages"], place),)
    prompt: Any = record.get("prompt")
    completion: Any = record.get("completion")
    if not _is_one_form(prompt, completion):
        raise _of_no_form(
            record,
            place,
            '{"prompt": text, "completion": text}, or {"messages": [{"role": ..., "content": ...}, ...]}, or prompt '
            "and completion are lists of messages.",
        )
    return (encoder.example(prompt, completion, place),)


def preference_of(encoder: Encoder, line: bytes, place: str) -> tuple[Example, Example]:
    """The chosen and the rejected answer. DataError: the line is no preference; `place` names it."""
    record = _parsed(line, place)
    parts: list[Any] = [record.get(key) for key in ("prompt", "chosen", "rejected")]
    prompt, chosen, rejected = parts
    if prompt is None and _is_one_form(chosen, rejected):
        shared = _num_shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not _is_one_form(prompt, chosen, rejected):
        raise _of_no_form(
            record,
            place,
            '{"prompt": text, "chosen": text, "rejected": text}, or all three are lists of messages; without prompt '
            "it is what both answers begin with, and each must go on after it.",
        )
    return encoder.example(prompt, chosen, place), encoder.example(prompt, rejected, place)


def _num_shared(chosen: Any, rejected: Any) -> int:
    """Messages, or characters, that both begin with. A space between the prompt and the answer belongs to the
    answer, as tokenizers have it."""
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected))
    return shared - 1 if shared and isinstance(chosen, str) and chosen[shared - 1] == " " else shared


def load_encoder(tokenizer: str) -> Encoder:
    """`tokenizer`: "bytes", or a directory with a tokenizer.json.

    Raises:
        TokenizerError: it cannot be read, or transformers is not installed.
    """
    if tokenizer == BYTE_TOKENIZER:
        return ByteEncoder()
    directory = Path(tokenizer).expanduser()
    if not (directory / TOKENIZER_NAME).is_file():
        raise TokenizerError(
            f"data.tokenizer {tokenizer!r} has no {TOKENIZER_NAME} on this node. Name a directory with one, which "
            'every node can read, or "bytes".'
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(f"the tokenizer needs transformers ({error}): pip install 'shoal[hf]'.") from error
    loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    digest = hashlib.sha256()
    for name in _OF_TOKENIZER:
        if (directory / name).is_file():
            digest.update(name.encode() + (directory / name).read_bytes())
    return ChatEncoder(loaded, digest.hexdigest())


class ByteEncoder:
    """One token per byte, and one that ends a completion."""

    fingerprint = "bytes-v1"
    padding = 0

    def example(self, prompt: Text, completion: Text, place: str) -> Example:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError(
                f"{place} has messages, and bytes have no chat template. Name a tokenizer in data.tokenizer."
            )
        before, after = prompt.encode(), completion.encode()
        tokens = [*before, *after, BYTE_VOCABULARY - 1]
        return Example(tokens, [False] * len(before) + [True] * (len(after) + 1))


class ChatEncoder:
    """A tokenizer of transformers, with its chat template."""

    def __init__(self, tokenizer: Any, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.padding = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)

    def example(self, prompt: Text, completion: Text, place: str) -> Example:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._pair(prompt, completion)
        return self._conversation([*prompt, *completion], len(prompt), place)

    def _pair(self, prompt: str, completion: str) -> Example:
        encoded = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        tokens = list(encoded["input_ids"])
        is_answer = [start >= len(prompt) and end > start for start, end in encoded["offset_mapping"]]
        end = self._tokenizer.eos_token_id
        if end is not None and tokens[-1:] == [end]:
            is_answer[-1] = True
        elif end is not None:
            tokens.append(end)
            is_answer.append(True)
        return Example(tokens, is_answer)

    def _conversation(self, messages: list[Any], first: int, place: str) -> Example:
        """`first`: of the messages that may be answers."""
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise DataError(
                f"{place} has messages, and the tokenizer has no chat template. Name a directory with "
                "chat_template.jinja in data.tokenizer, or give prompt and completion as texts."
            )
        if _MARKED in template and not first:
            marked = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return Example(list(marked["input_ids"]), [bool(one) for one in marked["assistant_masks"]])
        text = self._rendered(messages, place)
        spans = []
        for number, message in enumerate(messages):
            if number < first or message.get("role") != _ANSWERING:
                continue
            before = self._rendered(messages[:number], place, asks=True) if number else ""
            until = self._rendered(messages[: number + 1], place)
            if not until.startswith(before) or not text.startswith(until):
                raise DataError(
                    f"{place}: the chat template renders turn {number + 1} differently when others follow, so the "
                    f"tokens of its answer are not known. Use a template that marks answers with {_MARKED}, or a line "
                    "for each answer: prompt with the turns before, completion with the answer."
                )
            spans.append((len(before), len(until)))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_answer = [
            any(begin <= start < end and stop > start for begin, end in spans)
            for start, stop in encoded["offset_mapping"]
        ]
        return Example(list(encoded["input_ids"]), is_answer)

    def _rendered(self, messages: list[Any], place: str, *, asks: bool = False) -> str:
        """`asks`: with the words that ask for an answer."""
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{place}: the chat template does not render it: {error}") from error
        return text


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    return record if isinstance(record, dict) else {_NO_KEYS: type(record).__name__}


def _of_no_form(record: dict[str, Any], place: str, forms: str) -> DataError:
    found = record.get(_NO_KEYS) or f"the keys {', '.join(map(repr, record))}"
    return DataError(f"{place} has {found}. A line is {forms}")


_NO_KEYS = ""
"""The type of a line that is no object stands under it."""


def _is_one_form(*parts: Any) -> bool:
    """Whether all are texts, or all are messages."""
    return all(isinstance(one, str) for one in parts) or all(map(_are_messages, parts))


def _are_messages(value: Any) -> TypeGuard[list[Any]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)
    )
