"""Small tokenizers of the layouts that models have, each in a directory as transformers writes it.

byte-level    tokens of bytes, whose offsets are whole
trimmed       the same tokens; spaces do not count in their offsets
gpt-neox      the same with trimmed offsets, and one token for each run of spaces
metaspace     a mark in place of spaces, and a token that begins a text
wordpiece     words in small letters without spaces, and tokens that begin and end a text
fallback      a mark in place of spaces that begins each text, and bytes where no other token fits
nfkc          tokens of bytes of a text whose letters are others than those of the file, and tokens that were added
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LAYOUTS = ("byte-level", "trimmed", "gpt-neox", "metaspace", "wordpiece", "fallback", "nfkc")
_TEXTS = [
    *(f"Question: what is {number} plus {number}? Answer: yes it is {2 * number}.\n" for number in range(60)),
    *["def f(x):\n    if x:\n        return x\n    return None\n"] * 20,
    *["The sky is blue and the grass is green. Answer: no, it is yellow.\n"] * 20,
    *["user assistant system tool You are a helpful assistant\n"] * 20,
]
_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<unk>"]


def write_layout(directory: Path, layout: str, template: str | None = None) -> Path:
    """Returns the directory."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = _MAKERS[layout]()
    marks: dict[str, Any] = {"bos_token": "<|endoftext|>", "pad_token": "<pad>", "eos_token": "<|im_end|>"}
    if layout == "wordpiece":
        marks = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


@cache
def with_whole_offsets(tokenizer: Any) -> Tokenizer:
    """The tokenizer of one of transformers, with offsets that are not trimmed, and without ends of a text."""
    twin = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    twin.post_processor = processors.ByteLevel(trim_offsets=False)
    return twin


def _bytes(*, trims: bool, runs: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=_MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if runs:
        tokenizer.add_tokens([AddedToken(" " * length, normalized=True) for length in range(2, 9)])
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=_MARKS, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    marks = ["[CLS]", "[SEP]", *_MARKS[1:]]
    tokenizer.train_from_iterator(
        _TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=marks, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer


def _fallback() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*_MARKS, *bytes_], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] in _MARKS]
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


def _nfkc() -> Tokenizer:
    tokenizer = _bytes(trims=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("yes it", normalized=True)])
    return tokenizer


_MAKERS = {
    "byte-level": lambda: _bytes(trims=False),
    "trimmed": lambda: _bytes(trims=True),
    "gpt-neox": lambda: _bytes(trims=True, runs=True),
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
    "fallback": _fallback,
    "nfkc": _nfkc,
}
