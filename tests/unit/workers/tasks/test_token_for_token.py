"""Built-in text tasks read what transformers reads: every task, on every layout of a tokenizer, in every spelling of a
line. Where transformers has no rule (a prompt and an answer as texts), each token that overlaps the answer is the
answer's."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shoal_workers.data.errors import DataError
from shoal_workers.tasks.conversations import answer_of, load_encoder, preference_of, rows_in
from shoal_workers.tasks.lm import LanguageModel
from shoal_workers.tasks.rows import NO_LABEL
from shoal_workers.tasks.seq2seq import SequenceToSequence
from shoal_workers.tasks.text_classification import TextClassification

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from kit.worlds.tokenizer_layouts import LAYOUTS, with_whole_offsets, write_layout  # noqa: E402

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}{% endif %}",
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}<OPEN>"
    "{{ m['content'] }}<|im_end|><CLOSE>{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = {
    "marked": ("{% generation %}", "{% endgeneration %}"),
    "marked, trimmed": ("{%- generation -%}", "{%- endgeneration -%}"),
    "marked, tight": ("{%generation%}", "{%endgeneration%}"),
    "marked, kept": ("{%+ generation %}", "{%+ endgeneration %}"),
}
TEMPLATES = {
    "plain": CHATML,
    "parts": PARTS,
    "a comment with a mark": "{# {% generation %} #}" + CHATML,
    "spaced": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|im_end|>\n{% else %}"
        "{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
    ),
    **{name: MARKED.replace("<OPEN>", opens).replace("<CLOSE>", ends) for name, (opens, ends) in MARKS.items()},
}
_OTHERS = ("marked", "marked, tight", "marked, kept")
PAIRS = {
    "the border is a space": ("The sky is blue. Answer: ", "yes"),
    "the answer begins with a space": ("The sky is blue. Answer:", " yes it is 4."),
    "indentation": ("def f(x):\n", "    if x:\n        return x\n"),
    "indentation over the border": ("def f(x):\n  ", "  return x\n"),
    "no prompt": ("", "yes it is"),
    "two spaces": ("Answer:  ", "  no,  it is"),
    "letters of several bytes": ("naïve: ", "é ☃ 🙂"),
    "inside a word": ("The sky is ye", "llow."),
    "begins with the mark of a text": ("<|endoftext|>The sky ", "is blue"),
    "ends with the mark of a text": ("The sky ", "is blue<|im_end|>"),
    "ends with a space": ("Question: what is 2? ", "yes "),
    "only white space": ("Answer:", " \n "),
    "part of a letter": ("The e", "\u0301 is \u200d"),
    "a family over the border": ("👨\u200d", "👩\u200d👧"),
    "letters that become others": ("ﬁ ½", "İ ﬁ ｙｅｓ"),
    "a token that was added": ("Answer: ", "<tool>  yes it <tool> is"),
}
USER, ASSISTANT = ({"role": "user", "content": "what is 2 plus 2?"}, {"role": "assistant", "content": "yes it is 4."})
CODE = {"role": "assistant", "content": "def f(x):\n    return  x "}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2}}}]}
OTHER_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"y": "no"}}}]}


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "two turns": {"messages": [USER, ASSISTANT, USER, CODE]},
    "with a system prompt": {"messages": [{"role": "system", "content": "You are"}, USER, ASSISTANT]},
    "begins with the assistant": {"messages": [ASSISTANT, USER, CODE]},
    "the assistant twice": {"messages": [USER, ASSISTANT, CODE]},
    "prompt and completion": {"prompt": [USER, ASSISTANT, USER], "completion": [CODE]},
    "tools": {"messages": [USER, ASSISTANT], "tools": TOOLS},
    "tools as a text": {"messages": [USER, ASSISTANT], "tools": json.dumps(TOOLS)},
    "a call without content": {"messages": [USER, CALL, {"role": "tool", "content": "2"}, ASSISTANT]},
    "a call without the key": {"messages": [USER, {k: v for k, v in CALL.items() if v is not None}, USER, ASSISTANT]},
    "calls with other arguments": {"messages": [USER, CALL, {"role": "tool", "content": "2"}, OTHER_CALL]},
    "white space and letters of several bytes": {"messages": [USER, _says("  \n"), USER, _says(" 🙂"), _says("é ☃")]},
    "a list of one text": {"messages": [USER, {**ASSISTANT, "content": [{"type": "text", "text": "yes it is"}]}]},
    "lists of texts": {
        "messages": [{**USER, "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "is"}]}, CODE]
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: write_layout(tmp_path_factory.mktemp("layout"), layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def theirs(directories: dict[str, Path]) -> dict[str, Any]:
    """The tokenizers of transformers."""
    return {layout: transformers.AutoTokenizer.from_pretrained(path) for layout, path in directories.items()}


def _cells(example: Any) -> list[tuple[int, bool]]:
    return [(int(token), bool(is_answer)) for token, is_answer in zip(example.tokens, example.is_answer, strict=True)]


def _overlapping(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> list[tuple[int, bool]]:
    """Tokens of a text without its ends, and which of them have a character of a span."""
    encoding = with_whole_offsets(tokenizer).encode(text, add_special_tokens=False)
    answers = {at for begin, end in spans for at in range(begin, end)}
    pairs = zip(encoding.ids, encoding.offsets, strict=True)
    return [(token, not answers.isdisjoint(range(begin, end))) for token, (begin, end) in pairs]


def _expected_pair(tokenizer: Any, prompt: str, completion: str) -> list[tuple[int, bool]]:
    """The tokens of transformers for the whole text, a mark that begins it once, and the end of a text behind it."""
    text, whole = prompt + completion, tokenizer(prompt + completion)["input_ids"]
    body = _overlapping(tokenizer, text, [(len(prompt), len(text))])
    tokens = [token for token, _ in body]
    first = next(at for at in range(len(whole)) if whole[at : at + len(tokens)] == tokens)
    begin, end = whole[:first], whole[first + len(tokens) :]
    if tokens[: len(begin)] == begin:
        begin = []
    if tokenizer.eos_token_id not in (None, whole[-1]):
        end = [*end, tokenizer.eos_token_id]
    return [*((token, False) for token in begin), *body, *((token, True) for token in end)]


_TURN = re.compile(r"(?:<\|im_start\|>assistant\n|Answer:)(.*?<\|im_end\|>\n)", re.DOTALL)


def _expected_conversation(tokenizer: Any, record: dict[str, Any], template: str) -> list[tuple[int, bool]]:
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    prompt, messages = record.get("prompt", []), record.get("messages") or record["prompt"] + record["completion"]
    if template != "parts":
        messages = [
            {**one, "content": "".join(part["text"] for part in one["content"])}
            if isinstance(one.get("content"), list)
            else one
            for one in messages
        ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    asked = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) if prompt else ""
    spans = [turn.span(1) for turn in _TURN.finditer(text) if turn.start(1) >= len(asked)]
    if not template.startswith("marked"):
        theirs = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
        cells = _overlapping(tokenizer, text, spans)
        assert [token for token, _ in cells] == theirs
        return cells
    marked = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    after = _overlapping(tokenizer, text, [(len(asked), len(text))])
    return [
        (token, bool(mask) and is_after)
        for token, mask, (_, is_after) in zip(marked["input_ids"], marked["assistant_masks"], after, strict=True)
    ]


def test_each_token_that_overlaps_the_answer_is_the_answers(
    directories: dict[str, Path], theirs: dict[str, Any]
) -> None:
    failures = []
    for layout, directory in directories.items():
        encoder, tokenizer = load_encoder(str(directory)), theirs[layout]
        for name, (prompt, completion) in PAIRS.items():
            line = {"prompt": prompt, "completion": completion}
            (example,) = answer_of(encoder, line, "lines:1")
            if _cells(example) != (expected := _expected_pair(tokenizer, prompt, completion)):
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
            (example,) = answer_of(encoder, record, "lines:1")
            if _cells(example) != (expected := _expected_conversation(tokenizer, record, template)):
                failures.append((layout, name, _cells(example), expected))
    assert failures == []


def test_rows_of_a_table_are_the_same_conversations_as_lines(directories: dict[str, Path], tmp_path: Path) -> None:
    """Parquet has one kind of message, so each has nulls for the keys of the others."""
    others = ("prompt and completion", "tools as a text", "a list of one text", "lists of texts")
    lines = [record for name, record in CONVERSATIONS.items() if name not in others]
    parquet.write_table(pyarrow.Table.from_pylist(lines, _schema_of(lines)), tmp_path / "rows.parquet")
    (directories["trimmed"] / "chat_template.jinja").write_text(CHATML)
    encoder = load_encoder(str(directories["trimmed"]))
    for line, (row, place) in zip(lines, rows_in([tmp_path / "rows.parquet"]), strict=True):
        (expected,), (found,) = answer_of(encoder, line, "lines:1"), answer_of(encoder, row, place)
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
            found = [_cells(example) for example in preference_of(encoder, line, "lines:1")]
            if found != (expected := [_expected_pair(tokenizer, prompt, answer) for answer in (chosen, "no")]):
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
            found = [_cells(example) for example in preference_of(encoder, line, "lines:1")]
            kept = prompt.removesuffix(" ")  # of several spaces the last is the answer's
            expected = [_expected_pair(tokenizer, kept, prompt[len(kept) :] + answer) for answer in answers]
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
        (answer,) = answer_of(load_encoder(str(directory)), {"prompt": "", "completion": TEXTS[3]}, "lines:1")
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
            answer_of(load_encoder(str(directories["trimmed"])), record, "lines:7")
            failures.append((name, "not refused"))
        except DataError as error:
            if words not in str(error) or not str(error).startswith("lines:7"):
                failures.append((name, str(error)))
    assert failures == []
