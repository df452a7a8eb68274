"""Fine-tuning on answers: what is an answer, which examples share a sample, and that those do not see each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.families import FAMILIES
from shoal_workers.contract.hugging_face import SFT_TASK
from shoal_workers.data.errors import CorpusTooSmallError, DataError
from shoal_workers.tasks.answers import NO_LABEL, packed
from shoal_workers.tasks.conversations import encode_answer, load_encoder
from shoal_workers.tasks.rows import summed_cross_entropy
from shoal_workers.tasks.sft import SupervisedFineTuning

transformers = pytest.importorskip("transformers")

PAIRS = [
    {"prompt": "2 + 2 = ", "completion": "4"},
    {"prompt": "a", "completion": "bcd"},
    {"prompt": "", "completion": "x"},
]
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETS = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] if loop.last else '' }};{% endfor %}"
CHAT = [
    {"role": "user", "content": "how many fish"},
    {"role": "assistant", "content": "two fish"},
    {"role": "user", "content": "how many fish"},
    {"role": "assistant", "content": "many"},
]


def _lines(file: Path, *records: Any) -> str:
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(file)


def _task(tmp_path: Path, *records: Any, seq_len: int = 8, **data: Any) -> SupervisedFineTuning:
    given = {"paths": [_lines(tmp_path / "train.jsonl", *records)], "cache_dir": str(tmp_path / "cache")}
    given |= {"validation_fraction": 0, "tokenizer": "bytes", **data}
    model = {"config": small_config("llama"), "seq_len": seq_len}
    return SupervisedFineTuning(model, given, 0)


def _shown(sample: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Inputs, and labels with a dot for none, as text; # for the end."""

    def text(values: torch.Tensor) -> str:
        return "".join("." if one in (0, NO_LABEL) else "#" if one == 256 else chr(one) for one in values.tolist())

    return text(sample["tokens"]), text(sample["labels"])


def test_the_labels_are_the_completion_and_its_end(tmp_path: Path) -> None:
    data = _task(tmp_path, *PAIRS, seq_len=12).build_dataset("train")
    assert [_shown(data[index]) for index in range(len(data))] == [
        ("2 + 2 = 4...", ".......4#..."),
        ("abcd........", "bcd#........"),
        ("x...........", "#..........."),
    ]


def test_packed_examples_share_samples_and_begin_at_position_0(tmp_path: Path) -> None:
    data = _task(tmp_path, *PAIRS, seq_len=10, packing=True).build_dataset("train")
    assert [_shown(data[index]) for index in range(len(data))] == [
        ("2 + 2 = 4x", ".......4##"),
        ("abcd......", "bcd#......"),
    ]
    assert data[0]["positions"].tolist() == [*range(9), 0]
    assert data[1]["positions"].tolist() == [*range(4), *range(6)]


def test_the_longest_goes_first_into_the_sample_that_it_fills_best() -> None:
    assert packed({0: 3, 1: 6, 2: 4, 3: 2, 4: 7}, 10) == [(4, 0), (1, 2), (3,)]
    assert packed(dict.fromkeys(range(3), 10), 10) == [(0,), (1,), (2,)]


def test_long_examples_are_cut_and_left_out_without_an_answer(tmp_path: Path) -> None:
    late, long = {"prompt": "abcdefgh", "completion": "i"}, {"prompt": "a", "completion": "bcdefghijk"}
    data = _task(tmp_path, late, long, seq_len=4).build_dataset("train")
    assert [_shown(data[index]) for index in range(len(data))] == [("abcd", "bcde")]
    with pytest.raises(CorpusTooSmallError, match=r"1 lines, and none .* within model\.seq_len 4"):
        _task(tmp_path, late, seq_len=4).build_dataset("train")


def test_validation_has_files_of_its_own_or_a_fraction_of_the_lines(tmp_path: Path) -> None:
    records = [{"prompt": "p", "completion": str(number)} for number in range(40)]
    split = _task(tmp_path, *records, validation_fraction=0.5)
    sizes = [len(split.build_dataset(name)) for name in ("train", "validation")]
    assert sum(sizes) == 40 and min(sizes) > 5
    other = _lines(tmp_path / "other.jsonl", *records[:3])
    own = _task(tmp_path, *records, validation_fraction=0.5, validation_paths=[other])
    assert [len(own.build_dataset(name)) for name in ("train", "validation")] == [40, 3]


def test_what_was_tokenised_is_found_again_and_other_lines_are_other_data(tmp_path: Path) -> None:
    first = _task(tmp_path, *PAIRS).build_dataset("train").content_hash
    [made] = (tmp_path / "cache").iterdir()
    written_at = (made / "payload.bin").stat().st_mtime_ns
    assert _task(tmp_path, *PAIRS).build_dataset("train").content_hash == first
    assert (made / "payload.bin").stat().st_mtime_ns == written_at
    assert _task(tmp_path, *PAIRS[:2]).build_dataset("train").content_hash != first
    assert _task(tmp_path, *PAIRS, seq_len=9).build_dataset("train").content_hash != first


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', r"train\.jsonl, line 1 is not JSON"),
        ('{"text": "a"}', r"train\.jsonl, line 1 has the keys 'text'\. A line is"),
        ('["a"]', r"train\.jsonl, line 1 is a list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "bytes have no chat template"),
        ('{"messages": [{"role": "user"}]}', "has the keys 'messages'"),
        (r'{"prompt": "a", "completion": "\ud800b"}', r"train\.jsonl, line 1 is not UTF-8"),
        (
            '{"prompt": "a", "completion": "b", "chat_template_kwargs": "x"}',
            r"train\.jsonl, line 1: chat_template_kwargs is str",
        ),
    ],
)
def test_a_line_that_is_none_of_the_forms_is_named(tmp_path: Path, line: str, words: str) -> None:
    task = _task(tmp_path, *PAIRS)
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(DataError, match=words):
        task.build_dataset("train")


def _tokenizer(directory: Path, template: str | None) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<|start|>", "<|end|>", "[UNK]", "\n", "user", "assistant", "how", "many", "two", "fish", " "]
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s|[^\s<]+"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def _answers(directory: Path, record: Any) -> str:
    encoder = load_encoder(str(directory))
    (example,) = encode_answer(encoder, record, "train.jsonl:1")
    answers = [token for token, is_answer in zip(example.tokens, example.is_answer, strict=True) if is_answer]
    text: str = transformers.AutoTokenizer.from_pretrained(directory).decode(answers)
    return text


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_turn_of_the_assistant_is_an_answer(tmp_path: Path, template: str) -> None:
    directory = _tokenizer(tmp_path, template)
    assert _answers(directory, {"messages": CHAT}).split() == ["two", "fish", "<|end|>", "many", "<|end|>"]
    last = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert _answers(directory, last).split() == ["many", "<|end|>"]


def test_a_completion_ends_with_the_end_of_the_tokenizer(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, None)
    assert _answers(directory, {"prompt": "how many ", "completion": "two fish"}).split() == ["two", "fish", "<|end|>"]
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        _answers(directory, {"messages": CHAT})


def test_a_template_that_forgets_turns_is_refused(tmp_path: Path) -> None:
    directory = _tokenizer(tmp_path, FORGETS)
    with pytest.raises(DataError, match="renders turn 2 differently when others follow"):
        _answers(directory, {"messages": CHAT})


THREE = [
    {"prompt": "ab", "completion": "cde"},
    {"prompt": "x", "completion": "yz"},
    {"prompt": "q", "completion": "r"},
]


@pytest.mark.parametrize("family", sorted(name for name, one in FAMILIES.items() if one.isolates_packed))
def test_packed_examples_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    sums = {}
    for name, packing in (("padded", False), ("packed", True)):
        answers = _task(tmp_path, *THREE, seq_len=12, packing=packing).answers.model_dump()
        task = SupervisedFineTuning({"config": small_config(family), "seq_len": 12}, answers, 0)
        torch.manual_seed(1)
        model = task.build_model().eval()
        data = task.build_dataset("train")
        batch = torch.utils.data.default_collate([data[index] for index in range(len(data))])
        with torch.no_grad():
            for parameter in model.parameters():  # large, so that attention has an effect
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            positions = (batch["positions"],) if packing else ()
            total, _ = summed_cross_entropy(model(batch["tokens"], *positions), batch["labels"])
            blind, _ = summed_cross_entropy(model(batch["tokens"]), batch["labels"])
            loss = task.loss(model, batch)
        assert [float(one) for one in loss[:2]] == [float(total), 9]
        sums |= {name: float(total), f"{name} without positions": float(blind)}
    assert sums["packed"] == pytest.approx(sums["padded"], rel=1e-5)
    assert abs(sums["packed without positions"] - sums["padded"]) > 1e-3 * sums["padded"]


def test_a_family_that_does_not_isolate_packed_examples_is_refused(tmp_path: Path) -> None:
    answers = _task(tmp_path, *THREE, packing=True).answers.model_dump()
    with pytest.raises(ValueError, match="of the architecture 'gpt_oss' it is not known that examples"):
        SupervisedFineTuning({"config": small_config("gpt_oss"), "seq_len": 12}, answers, 0).build_model()


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    task = _task(tmp_path, *PAIRS)
    model: Any = task.build_model()
    data = task.build_dataset("train")
    batch = torch.utils.data.default_collate([data[index] for index in range(len(data))])
    with torch.no_grad():
        theirs = model.network(batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"]).loss
        total, weight, *_ = task.loss(model, batch)
    assert float(total / weight) == pytest.approx(float(theirs), abs=1e-6)


def test_a_spec_has_the_keys_of_the_task() -> None:
    document: dict[str, Any] = {"task": SFT_TASK, "stop": {"steps": 1}, "model": {"config": small_config("llama")}}
    assert parse_spec({**document, "data": {"paths": ["/a.jsonl"]}}).task == SFT_TASK
    with pytest.raises(SpecError, match=r"data\.paths"):
        parse_spec({**document, "data": {}})
    with pytest.raises(SpecError, match=r"data\.corpus.*unknown key"):
        parse_spec({**document, "data": {"paths": ["/a.jsonl"], "corpus": "python-stdlib"}})
    bloom = {**document, "model": {"config": {"model_type": "bloom"}}}
    with pytest.raises(SpecError, match=r"data\.packing is true, and .* 'bloom'"):
        parse_spec({**bloom, "data": {"paths": ["/a.jsonl"], "packing": True}})
