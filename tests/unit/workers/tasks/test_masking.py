"""Which tokens of a sample are hidden: the shares of Devlin et al., from the seed and the position alone."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.errors import TokenizerError
from shoal_workers.engine.sample_order import training_order
from shoal_workers.tasks.masked_lm import NO_LABEL, MaskedLanguageModel, MaskedSamples, Masking

_MASK = 999


def _masking(**changes: Any) -> Masking:
    settings = {"fraction": 0.15, "mask": _MASK, "vocab_size": 1000, "kept": frozenset({0, 1, _MASK}), "seed": 7}
    return Masking(**{**settings, **changes})


def test_of_each_sample_the_fraction_is_hidden_and_eight_of_ten_by_the_mask() -> None:
    tokens = np.tile(np.arange(2, 102), 4)
    num_hidden = num_masked = num_random = num_same = 0
    for number in range(400):
        hidden, labels = _masking().apply(tokens, number)
        chosen = labels != NO_LABEL
        assert chosen.sum() == 60, "15 % of 400"
        assert (hidden[~chosen] == tokens[~chosen]).all() and (labels[chosen] == tokens[chosen]).all()
        num_hidden += 60
        num_masked += int((hidden[chosen] == _MASK).sum())
        num_same += int((hidden[chosen] == tokens[chosen]).sum())
        num_random += int(((hidden != tokens) & (hidden != _MASK)).sum())
    assert num_masked / num_hidden == pytest.approx(0.8, abs=0.01)
    assert num_random / num_hidden == pytest.approx(0.1, abs=0.01)
    assert num_same / num_hidden == pytest.approx(0.1, abs=0.01)


def test_each_place_is_chosen_equally_often() -> None:
    tokens = np.arange(2, 42)
    counts = np.zeros(40)
    for number in range(4000):
        counts += _masking().apply(tokens, number)[1] != NO_LABEL
    assert counts.min() > 4000 * 0.15 * 0.85 and counts.max() < 4000 * 0.15 * 1.15


def test_special_tokens_are_neither_hidden_nor_put_in_the_place_of_others() -> None:
    tokens = np.array([0, 5, 1, 6, 7, 1, _MASK, 8] * 20)
    special = np.isin(tokens, [0, 1, _MASK])
    for number in range(200):
        hidden, labels = _masking(vocab_size=9).apply(tokens, number)
        assert (labels[special] == NO_LABEL).all() and (hidden[special] == tokens[special]).all()
        assert set(hidden[~special]) <= {2, 3, 4, 5, 6, 7, 8, _MASK}
    hidden, labels = _masking().apply(np.array([0, 1, 0]), 1)
    assert (labels == NO_LABEL).all() and hidden.tolist() == [0, 1, 0]
    assert (_masking().apply(np.array([5, 0]), 1)[1] != NO_LABEL).sum() == 1, "at least one"


def test_the_mask_is_the_same_for_ever() -> None:
    """A new version of NumPy, another machine and a later release must hide the same tokens."""
    hidden, labels = _masking().apply(np.arange(2, 66), (1 << 70) + 12)
    digest = hashlib.sha256(hidden.astype("<i8").tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "bb51475e7b8bf440"


class _Texts:
    content_hash = "text"

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(100 * index + 2, 100 * index + 35)


def test_each_epoch_hides_other_tokens_of_the_same_samples_and_validation_always_the_same() -> None:
    train = MaskedSamples(_Texts(), _masking(), (0,), (1,), is_training=True)
    epochs = [training_order(train, range(10 * epoch, 10 * epoch + 10), seed=7) for epoch in range(2)]
    read = [{index % 10: train[index] for index in epoch} for epoch in epochs]
    assert set(read[0]) == set(read[1]) == set(range(10))
    assert all(not torch.equal(read[0][one]["labels"], read[1][one]["labels"]) for one in range(10))
    for sample in (read[0][3], read[1][3]):
        whole = torch.where(sample["labels"] == NO_LABEL, sample["tokens"], sample["labels"])
        assert whole.tolist() == [0, *range(302, 334), 1], "between the tokens that begin and end a text"
        assert sample["labels"][[0, -1]].tolist() == [NO_LABEL, NO_LABEL]
    assert training_order(train, range(4, 9), seed=7) == epochs[0][4:9], "whatever the micro-batch is"
    validation = MaskedSamples(_Texts(), _masking(), (), (), is_training=False)
    assert torch.equal(validation[3]["tokens"], validation[3]["tokens"])
    assert validation.content_hash != train.content_hash
    other = MaskedSamples(_Texts(), _masking(fraction=0.3), (), (), is_training=False)
    assert other.content_hash != validation.content_hash


def _tokenizer(file: Path, *special: str) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    words = [*special, "the", "fish", "swims", "."]
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=special[0])
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.add_special_tokens(list(special))
    if "[CLS]" in special:
        numbers = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
        own.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=numbers)
    own.enable_truncation(6)
    own.enable_padding(length=6)
    own.save(str(file))
    return str(file)


def test_a_sample_is_a_piece_of_text_between_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the fish swims . " * 100)
    name = _tokenizer(tmp_path / "tokenizer.json", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]")
    data = {"paths": [str(tmp_path / "text.txt")], "tokenizer": name, "cache_dir": str(tmp_path / "cache")}
    config = {"model_type": "bert", "vocab_size": 16}
    task = MaskedLanguageModel({"config": config, "seq_len": 10}, {**data, "validation_fraction": 0}, 7)
    assert TextDataConfig.model_fields.keys() < type(task.masked).model_fields.keys()
    task.prepare(lambda _: None)
    samples = task.build_dataset("train")
    assert len(samples) == 400 // 8, "the tokenizer's truncation and padding are for other programs"
    sample = samples[3]
    assert sample["tokens"].shape == (10,) and sample["tokens"][[0, -1]].tolist() == [1, 2]
    whole = torch.where(sample["labels"] == NO_LABEL, sample["tokens"], sample["labels"])
    assert whole.tolist() == [1, *[5, 6, 7, 8] * 2, 2]


def test_a_tokenizer_without_a_mask_token_is_refused_before_the_text_is_read(tmp_path: Path) -> None:
    name = _tokenizer(tmp_path / "tokenizer.json", "[UNK]", "[X]")
    data = {"paths": [str(tmp_path / "missing.txt")], "tokenizer": name}
    model = {"config": {"model_type": "bert"}}
    with pytest.raises(TokenizerError, match=r"has no token \[MASK\] or <mask>, .* in data\.mask_token"):
        MaskedLanguageModel(model, data, 7).prepare(lambda _: None)
    with pytest.raises(TokenizerError, match=r"has no token \[Y\]"):
        MaskedLanguageModel(model, {**data, "mask_token": "[Y]"}, 7).prepare(lambda _: None)
    (tmp_path / "missing.txt").write_text("the fish swims . " * 400)
    own = {**data, "mask_token": "[X]", "cache_dir": str(tmp_path / "cache")}
    samples = MaskedLanguageModel(model, own, 7).build_dataset("train")
    assert any((samples[index]["tokens"] == 1).any() for index in range(4))
