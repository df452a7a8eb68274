"""Prompts with answers, conversations and preferences, from JSON lines or rows of other files to tokens with a mask of
those that are answers.

    {"prompt": text, "completion": text}           the text of both, and the token that ends a text; the completion and
                                                   the end are the answer
    {"messages": [{"role", "content"}, ...]}       what the chat template makes of them; each turn of the assistant is
                                                   an answer, without the header that asks for it
    {"prompt": messages, "completion": messages}   the same, but the turns of the prompt are no answers
    {"prompt", "chosen", "rejected"}               a preference: two completions of one prompt, as above. Without prompt
                                                   it is what both begin with
    "tools", "documents", "chat_template_kwargs"   beside messages: what the template gets besides

transformers renders and tokenises, always the whole text, so that tokens are those of a model that answers. If a
template marks answers itself ({% generation %}), transformers also decides which tokens they have. Of another one, the
text before and after each answer is rendered, and the answer is what has been added: this requires that a turn is
rendered in the same way whatever follows, and is refused where it is not. Each token that overlaps the text of an
answer is the answer's.

Called by the tasks, in their preparation. Only this module knows what a line may contain.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from shoal_workers.contract.hugging_face import TOKENIZER_NAME
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY, TextDataConfig, TextFormat
from shoal_workers.data.errors import DataError, TokenizerError
from shoal_workers.data.records import Fault, not_utf8, read_rows
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenizer import JsonTokenizer, load_with_transformers

_ANSWERING = "assistant"
_MARKED = "{% generation %}"
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_OF_TOKENIZER = (TOKENIZER_NAME, "tokenizer_config.json", "special_tokens_map.json", "*.jinja", "*/*.jinja")
_TABLES = (TextFormat.PARQUET, TextFormat.ARROW)
_CONTENT = "\ue000"
"""Stands for the content of an answer in a rendering that shows its header."""


Text = str | list[Any]
"""A text, or messages."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its answer, or one conversation."""

    tokens: Sequence[int]
    is_answer: Sequence[bool]


def find_row_files(paths: Sequence[str]) -> list[SourceFile]:
    """Find the files of paths, globs, directories and URLs, in order. One whose name says nothing is JSON lines.

    Raises:
        MissingTextError: an entry names no file.
    """
    files = find_sources(TextDataConfig(paths=tuple(paths))) if paths else []
    return [replace(file, format=TextFormat.JSONL) if file.format is TextFormat.TEXT else file for file in files]


def read_file_rows(files: Sequence[SourceFile]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of the files, and where it stands. DataError: a file is damaged, or a row cannot be read."""
    for file in files:
        is_empty = True
        for row in read_rows(file, (), ""):
            is_empty = False
            values = row.values if isinstance(row.values, Fault) else not_utf8(tuple(row.values.values())) or row.values
            if isinstance(values, Fault):
                raise DataError(f"{row.place} {values.reason}. {values.way_out}.")
            yield _without_nulls(values) if file.format in _TABLES else values, row.place
        if is_empty:
            raise DataError(f"{file.location} has no rows. Write it again, or remove it.")


def _without_nulls(value: Any) -> Any:
    """Arrow gives each object all keys that an object of its column has, as TRL knows, too."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def encode_answer(encoder: Encoder, record: dict[str, Any], place: str) -> tuple[Example, ...]:
    """DataError: the row has none of the forms of an answer; `place` names it."""
    if _are_messages(record.get("messages")):
        return _examples(encoder, record, place, [], record["messages"])
    prompt: Any = record.get("prompt")
    completion: Any = record.get("completion")
    if not _is_one_form(prompt, completion):
        raise _of_no_form(
            record,
            place,
            '{"prompt": text, "completion": text}, or {"messages": [{"role": ..., "content": ...}, ...]}, or prompt '
            "and completion are lists of messages.",
        )
    return _examples(encoder, record, place, prompt, completion)


def encode_preference(encoder: Encoder, record: dict[str, Any], place: str) -> tuple[Example, ...]:
    """Return the chosen and the rejected answer. DataError: the row is no preference; `place` names it."""
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
    return _examples(encoder, record, place, prompt, chosen, rejected)


def _examples(
    encoder: Encoder, record: dict[str, Any], place: str, prompt: Text, *answers: Text
) -> tuple[Example, ...]:
    """An example of the prompt with each answer."""
    variables = _variables(record, place)
    try:
        return tuple(encoder.example(prompt, answer, place, variables) for answer in answers)
    except (TypeError, UnicodeEncodeError) as error:  # \ud800 alone is valid JSON
        raise DataError(f"{place} has a text that is not valid Unicode ({error}). Correct it.") from error


def _num_shared(chosen: Any, rejected: Any) -> int:
    """Messages, or characters, that both begin with, as TRL counts them. A space between the prompt and the answer
    belongs to the answer, as tokenizers have it."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((number for number, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    return shared - (isinstance(chosen, str) and chosen[:shared][-1:] == " ")


def _variables(record: dict[str, Any], place: str) -> dict[str, Any]:
    """What the chat template gets besides the messages, as TRL passes it."""
    given = {name: record[name] for name in ("tools", "documents") if record.get(name) is not None}
    try:
        given = {name: json.loads(value) if isinstance(value, str) else value for name, value in given.items()}
    except ValueError as error:
        raise DataError(f"{place}: {' or '.join(given)} is not JSON: {error}") from error
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise DataError(f"{place}: chat_template_kwargs is {type(more).__name__}, not an object. Correct it.")
    return {**more, **given}


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
    loaded = load_with_transformers(directory)
    digest = hashlib.sha256()
    for file in (file for pattern in _OF_TOKENIZER for file in sorted(directory.glob(pattern))):
        digest.update(file.name.encode() + file.read_bytes())
    return ChatEncoder(loaded, digest.hexdigest())


class ByteEncoder:
    """One token per byte, and one that ends a completion."""

    fingerprint = "bytes-v1"
    """Differs between encoders that may make different examples of the same line."""
    padding = 0
    """A token that fills a sample; nothing is computed of it."""

    def example(self, prompt: Text, completion: Text, place: str, variables: Mapping[str, Any]) -> Example:
        """DataError: it cannot be encoded; `place` names the line. `variables`: of the chat template."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError(
                f"{place} has messages, and bytes have no chat template. Name a tokenizer in data.tokenizer."
            )
        before, after = prompt.encode(), completion.encode()
        tokens = [*before, *after, BYTE_VOCABULARY - 1]
        return Example(tokens, [False] * len(before) + [True] * (len(after) + 1))


class ChatEncoder:
    """A tokenizer of transformers, with its chat template; the methods are those of ByteEncoder."""

    def __init__(self, tokenizer: Any, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.padding = next(
            (token_id for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token_id is not None), 0
        )
        self._text = copy.deepcopy(tokenizer.backend_tokenizer)
        self._text.encode_special_tokens = tokenizer.split_special_tokens  # a copy forgets it
        begin, end = JsonTokenizer(self._text, fingerprint).ends
        self._begin, self._end = list(begin), list(end)
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in end:
            self._end.append(tokenizer.eos_token_id)
        self._text.post_processor = None  # it adds the ends, and may trim spaces off the offsets of tokens

    def example(self, prompt: Text, completion: Text, place: str, variables: Mapping[str, Any]) -> Example:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._pair(prompt, completion)
        return self._conversation([*prompt, *completion], len(prompt), place, variables)

    def _pair(self, prompt: str, completion: str) -> Example:
        text = prompt + completion
        body = self._encoded(text, [(len(prompt), len(text))])
        tokens, is_answer = list(body.tokens), list(body.is_answer)
        begin = [] if tokens[: len(self._begin)] == self._begin else self._begin
        has_end = any(is_answer[-1:]) and tokens[-len(self._end) :] == self._end
        end = [] if has_end else self._end
        return Example([*begin, *tokens, *end], [*[False] * len(begin), *is_answer, *[True] * len(end)])

    def _conversation(self, messages: list[Any], first: int, place: str, variables: Mapping[str, Any]) -> Example:
        """`first`: of the messages that may be answers."""
        messages = self._with_texts(messages, place, variables)
        text = self._rendered(messages, place, variables)
        if _MARK.search(_COMMENT.sub("", self._tokenizer.get_chat_template(tools=variables.get("tools")))):
            mask = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            marked = self._rendered(messages, place, variables, **mask)
            begin = len(self._before(messages, first, text, place, variables)) if first else 0
            after_prompt = self._encoded(text, [(begin, len(text) + 1)]).is_answer
            both = zip(marked["assistant_masks"], after_prompt, strict=True)
            return Example(list(marked["input_ids"]), [bool(piece) and is_after for piece, is_after in both])
        spans = []
        for number, message in enumerate(messages):
            if number < first or message.get("role") != _ANSWERING:
                continue
            before = self._before(messages, number, text, place, variables)
            until = self._rendered(messages[: number + 1], place, variables)
            if not until.startswith(before) or not text.startswith(until):
                raise _changes(number, place)
            spans.append((len(before), len(until)))
        return self._encoded(text, spans)

    def _before(self, messages: list[Any], number: int, text: str, place: str, variables: Mapping[str, Any]) -> str:
        """Return the text before the answer in message `number`, with the header that asks for it."""
        if number:
            before: str = self._rendered(messages[:number], place, variables, add_generation_prompt=True)
        else:
            alone = [{"role": messages[0]["role"], "content": _CONTENT}]
            whole: str = self._rendered(alone, place, variables)
            asking: str = self._rendered(alone, place, variables, add_generation_prompt=True)
            before, header = whole.partition(_CONTENT)[0], asking.removeprefix(whole)
            if header and header in before:
                before = before[: before.rindex(header) + len(header)]
        if not text.startswith(before):
            raise _changes(number, place)
        return before

    def _encoded(self, text: str, answers: Sequence[tuple[int, int]]) -> Example:
        """`answers`: where they begin and end in the text."""
        encoding = self._text.encode(text, add_special_tokens=False)
        is_answer = [
            any(start < end and max(stop, start + 1) > begin for begin, end in answers)
            for start, stop in encoding.offsets
        ]
        return Example(encoding.ids, is_answer)

    def _with_texts(self, messages: list[Any], place: str, variables: Mapping[str, Any]) -> list[Any]:
        """Return the messages, with lists of texts joined unless the template reads lists."""
        lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        if not lists:
            return messages
        try:
            text = self._rendered(messages, place, variables)
        except DataError:
            text = str(lists)
        if not any(str(content) in text for content in lists):
            return messages
        if not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for content in lists for part in content
        ):
            raise DataError(
                f"{place}: a content is a list with other parts than texts, which the chat template does not read. "
                'Leave the line out, or write each content as text or as [{"type": "text", "text": ...}].'
            )
        return [
            {**message, "content": "".join(part["text"] for part in message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _rendered(self, messages: list[Any], place: str, variables: Mapping[str, Any], **how: Any) -> Any:
        """What the chat template makes of the messages, as text unless `how` asks for tokens."""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{place} has messages, and the tokenizer has no chat template. Name a directory with "
                "chat_template.jinja in data.tokenizer, or give prompt and completion as texts."
            )
        try:
            return self._tokenizer.apply_chat_template(messages, **{**variables, "tokenize": False, **how})
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{place}: the chat template does not render it: {error}") from error


Encoder = ByteEncoder | ChatEncoder


def _changes(number: int, place: str) -> DataError:
    return DataError(
        f"{place}: the chat template renders turn {number + 1} differently when others follow, so the tokens of its "
        f"answer are not known. Use a template that marks answers with {_MARKED}, or a line for each answer: prompt "
        "with the turns before, completion with the answer."
    )


def _of_no_form(record: dict[str, Any], place: str, forms: str) -> DataError:
    return DataError(f"{place} has the keys {', '.join(map(repr, record))}. A line is {forms}")


def _is_one_form(*parts: Any) -> bool:
    """Return whether all are texts, or all are messages."""
    return all(isinstance(part, str) for part in parts) or all(map(_are_messages, parts))


def _are_messages(value: Any) -> TypeGuard[list[Any]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and "role" in message for message in value)
        and all(any(message[key] is not None for key in message if key != "role") for message in value)
    )
