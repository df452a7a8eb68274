"""Built-in text tasks read what transformers reads: every task, on every layout of a tokenizer, in every spelling of a
line. Where transformers has no rule (a prompt and an answer as texts), each token that overlaps the answer is the
answer's."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shoal_workers.data.errors import DataError
from shoal_workers.tasks.conversations import (
    encode_answer,
    encode_preference,
    find_row_files,
    load_encoder,
    read_file_rows,
)
from shoal_workers.tasks.lm import LanguageModel
from shoal_workers.tasks.rows import NO_LABEL
from shoal_workers.tasks.seq2seq import SequenceToSequence
from shoal_workers.tasks.text_classification import TextClassification

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from kit.worlds.their_tokens import (  # noqa: E402
    ASSISTANT,
    CHATML,
    CONVERSATIONS,
    PAIRS,
    TEMPLATES,
    USER,
    expected_conversation,
    expected_pair,
)
from kit.worlds.tokenizer_layouts import LAYOUTS, write_layout  # noqa: E402

_OTHERS = ("marked", "marked, tight", "marked, kept")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: write_layout(tmp_path_factory.mktemp("layout"), layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def theirs(directories: dict[str, Path]) -> dict[str, Any]:
    """The tokenizers of transformers."""
    return {layout: transformers.AutoTokenizer.from_pretrained(path) for layout, path in directories.items()}


def _cells(example: Any) -> list[tuple[int, bool]]:
    return [(int(token), bool(is_answer)) for token, is_answer in zip(example.tokens, example.is_answer, strict=True)]


def test_each_token_that_overlaps_the_answer_is_the_answers(
    directories: dict[str, Path], theirs: dict[str, Any]
) -> None:
    failures = []
    for layout, directory in directories.items():
        encoder, tokenizer = load_encoder(str(directory)), theirs[layout]
        for name, (prompt, completion) in PAIRS.items():
            line = {"prompt": prompt, "completion": completion}
            (example,) = encode_answer(encoder, line, "lines:1")
            if _cells(example) != (expected := expected_pair(tokenizer, prompt, completion)):
                failures.append((layout, name, _cells(example), expected))
    assert failures == []


@pytest.mark.parametrize(
    "template",
    [
        "plain",
        "parts",
        "a comment with a mark",
        "spaced",
        "marked, trimmed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS),
    ],
)
def test_a_conversation_has_the_tokens_and_the_answers_of_its_template(
    directories: dict[str, Path], theirs: dict[str, Any], template: str
) -> None:
    failures = []
    for layout, directory in directories.items():
        (directory / "chat_template.jinja").write_text(TEMPLATES[template])
        encoder, tokenizer = load_encoder(str(directory)), theirs[layout]
        tokenizer.chat_template = TEMPLATES[template]
        for name, record in CONVERSATIONS.items():
            (example,) = encode_answer(encoder, record, "lines:1")
            if _cells(example) != (expected := expected_conversation(tokenizer, record, template)):
                failures.append((layout, name, _cells(example), expected))
    assert failures == []


def test_rows_of_a_table_are_the_same_conversations_as_lines(directories: dict[str, Path], tmp_path: Path) -> None:
    """Parquet has one kind of message, so each has nulls for the keys of the others."""
    others = ("prompt and completion", "tools as a text", "a list of one text", "lists of texts")
    lines = [record for name, record in CONVERSATIONS.items() if name not in others]
    parquet.write_table(pyarrow.Table.from_pylist(lines, _schema_of(lines)), tmp_path / "rows.parquet")
    (directories["trimmed"] / "chat_template.jinja").write_text(CHATML)
    encoder = load_encoder(str(directories["trimmed"]))
    for line, (row, place) in zip(lines, read_file_rows(find_row_files([str(tmp_path / "rows.parquet")])), strict=True):
        (expected,), (found,) = encode_answer(encoder, line, "lines:1"), encode_answer(encoder, row, place)
        assert _cells(found) == _cells(expected)


def _schema_of(rows: list[dict[str, Any]]) -> Any:
    """With the columns of all rows, not of the first alone."""
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    return pyarrow.schema([(name, pyarrow.infer_type(values)) for name, values in columns.items()])


def test_a_preference_has_the_tokens_of_its_two_answers(directories: dict[str, Path], theirs: dict[str, Any]) -> None:
    failures = []
    for layout, directory in directories.items():
        encoder, tokenizer = load_encoder(str(directory)), theirs[layout]
        for name, (prompt, chosen) in PAIRS.items():
            line = {"prompt": prompt, "chosen": chosen, "rejected": "no"}
            found = [_cells(example) for example in encode_preference(encoder, line, "lines:1")]
            if found != (expected := [expected_pair(tokenizer, prompt, answer) for answer in (chosen, "no")]):
                failures.append((layout, name, found, expected))
    assert failures == []


def test_without_a_prompt_it_is_what_both_answers_begin_with(
    directories: dict[str, Path], theirs: dict[str, Any]
) -> None:
    """The characters, as in TRL: a token that goes over the border is the answer's."""
    texts = {
        "a word": ("The sky. Answer: ye", "s", "llow"),
        "a number": ("it is 2", "4", "8"),
        "with a point": ("it is 2.", "5 km", "7 km"),
        "a space": ("is it?", " yes", " no"),
        "no space": ("Answer:", "yes", "no"),
        "a line": ("def f(x):\n    ", "return x", "if x:"),
        "one goes on": ("yes", "", ", it is"),
        "nothing": ("", "yes", "no"),
    }
    failures = []
    for layout, directory in directories.items():
        encoder, tokenizer = load_encoder(str(directory)), theirs[layout]
        for name, (prompt, *answers) in texts.items():
            line = {"chosen": prompt + answers[0], "rejected": prompt + answers[1]}
            found = [_cells(example) for example in encode_preference(encoder, line, "lines:1")]
            kept = prompt.removesuffix(" ")  # of several spaces the last is the answer's
            expected = [expected_pair(tokenizer, kept, prompt[len(kept) :] + answer) for answer in answers]
            if found != expected:
                failures.append((layout, name, found, expected))
    assert failures == []


TEXTS = ["The sky is blue.\n", "def f(x):\n    return x\n", "naïve ☃ is 4  ", "<|im_start|>user yes"]


def _specials(tokenizer: Any, text: str) -> tuple[list[int], list[int], list[int]]:
    """The marks that begin a text, its tokens, and the marks that end it."""
    whole, body = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    first = next(at for at in range(len(whole)) if whole[at : at + len(body)] == body)
    return whole[:first], body, whole[first + len(body) :]


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{layout: (layout, {}) for layout in LAYOUTS},
    "cut at the left": ("metaspace", {"truncation_side": "left"}),
    "with its case": ("wordpiece", {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "unk_token": "<unk>"}),
    "one more token": ("trimmed", {"extra_special_tokens": ["sky is"]}),
    "marks are text": ("trimmed", {"split_special_tokens": True}),
    "a space before": ("trimmed", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
}
"""A layout, and what its tokenizer_config.json says besides."""


def test_other_tasks_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Documents of a text one after the other, each with the end of a text; classes and targets as the model takes
    them, cut as transformers cuts."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text, "label": 1, "source": text, "target": text}) for text in TEXTS))
    failures = []
    for layout, (base, settings) in SETTINGS.items():
        directory = write_layout(tmp_path / layout, base)
        described = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps({**described, **settings}))
        tokenizer, name = transformers.AutoTokenizer.from_pretrained(directory), str(directory / "tokenizer.json")
        data = {"paths": [str(rows)], "cache_dir": str(tmp_path / layout), "tokenizer": name, "validation_fraction": 0}
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        documents = [[*_specials(tokenizer, text)[1], end] for text in TEXTS]
        flat = [token for tokens in documents for token in tokens]
        length = len(flat) - 1
        language = LanguageModel({"seq_len": length}, data, 0).build_dataset("train")
        model = {"config": {"model_type": "bert"}, "num_labels": 2, "seq_len": 8}
        classes = TextClassification(model, data, 0).build_dataset("train")
        pair_model = {"config": {"model_type": "t5", "pad_token_id": 3}, "seq_len": 8, "target_len": 5}
        pairs = SequenceToSequence(pair_model, data, 0).build_dataset("train")
        cut = [tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in TEXTS]
        short = [tokenizer(text, truncation=True, max_length=5)["input_ids"] for text in TEXTS]
        (answer,) = encode_answer(load_encoder(str(directory)), {"prompt": "", "completion": TEXTS[3]}, "lines:1")
        found = {
            "answers": list(answer.tokens)[: len(tokenizer(TEXTS[3])["input_ids"])],
            "language model": language[0].tolist(),
            "classes": [s["tokens"][s["is_token"] == 1].tolist() for s in (classes[n] for n in range(len(TEXTS)))],
            "sources": [s["tokens"][s["is_token"] == 1].tolist() for s in (pairs[n] for n in range(len(TEXTS)))],
            "targets": [s["labels"][s["labels"] != NO_LABEL].tolist() for s in (pairs[n] for n in range(len(TEXTS)))],
        }
        expected = {
            "answers": tokenizer(TEXTS[3])["input_ids"],
            "language model": flat,
            "classes": cut,
            "sources": cut,
            "targets": short,
        }
        failures += [(layout, task, found[task], tokens) for task, tokens in expected.items() if found[task] != tokens]
    assert failures == []


def test_a_line_that_a_template_does_not_render_is_named(directories: dict[str, Path]) -> None:
    refuses = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('begin with the user') }}{% endif %}"
    picture = {"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what"}]}
    failures = []
    for name, template, record, words in (
        ("raises", refuses + CHATML, {"messages": [{"role": "tool", "content": "2"}]}, "begin with the user"),
        ("raises, marked", refuses + TEMPLATES["marked"], {"messages": [{"role": "tool", "content": "2"}]}, "the user"),
        ("an image", CHATML, {"messages": [picture, ASSISTANT]}, "a list with other parts than texts"),
        ("an image, marked", TEMPLATES["marked"], {"messages": [picture, ASSISTANT]}, "with other parts than texts"),
        ("tools that are no JSON", CHATML, {"messages": [USER, ASSISTANT], "tools": "f("}, "tools is not JSON"),
        ("tools that are no list", CHATML, {"messages": [USER, ASSISTANT], "tools": [3]}, "does not render it"),
        ("nothing said", CHATML, {"messages": [USER, {"role": "assistant", "content": None}]}, "the keys 'messages'"),
    ):
        (directories["trimmed"] / "chat_template.jinja").write_text(template)
        try:
            encode_answer(load_encoder(str(directories["trimmed"])), record, "lines:7")
            failures.append((name, "not refused"))
        except DataError as error:
            if words not in str(error) or not str(error).startswith("lines:7"):
                failures.append((name, str(error)))
    assert failures == []
