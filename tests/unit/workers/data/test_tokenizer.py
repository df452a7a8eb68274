"""Bytes are tokens as they are; a tokenizer file that cannot be used is refused with the way out."""

import importlib.util
import json
from pathlib import Path

import pytest

from shoal_workers.data.errors import TokenizerError
from shoal_workers.data.tokenizer import ByteTokenizer, load_tokenizer

_WORD_LEVEL = """{"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2, "</s>": 3}, "unk_token": "[UNK]"}}"""


def test_bytes_are_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é\0".encode()).tolist() == [0xC3, 0xA9, 0]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


@pytest.mark.parametrize("name", ["no/such/tokenizer.json", "null\0byte", ""])
def test_a_missing_tokenizer_file_is_named(name: str) -> None:
    with pytest.raises(TokenizerError, match=r'cannot be read: .* must be "bytes" or the path') as caught:
        load_tokenizer(name)
    assert f"data.tokenizer {name!r}" in str(caught.value)


def test_a_tokenizer_file_is_used_or_the_missing_extra_named(tmp_path: Path) -> None:
    """Both are right, depending on whether the optional package is installed where the tests run."""
    path = tmp_path / "tokenizer.json"
    path.write_text(_WORD_LEVEL)
    if importlib.util.find_spec("tokenizers") is None:
        with pytest.raises(TokenizerError, match=r"pip install 'shoal\[hf\]'"):
            load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.encode(b"hello big world").tolist() == [1, 0, 2]
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (4, 3)
        path.write_text("{}")
        with pytest.raises(TokenizerError, match="is not a tokenizers JSON file"):
            load_tokenizer(str(path))


def test_the_end_of_a_document_is_what_the_files_of_the_tokenizer_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    named = {
        "by its name": ({}, 3),
        "in the tokenizer's settings": ({"tokenizer_config.json": {"eos_token": "hello"}}, 1),
        "with its settings": ({"tokenizer_config.json": {"eos_token": {"content": "world"}}}, 2),
        "in the map of special tokens": ({"special_tokens_map.json": {"eos_token": "world"}}, 2),
        "not in the vocabulary": ({"tokenizer_config.json": {"eos_token": "<end>"}}, 3),
        "null": ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, 3),
        "damaged": ({"tokenizer_config.json": []}, 3),
    }
    no_name = _WORD_LEVEL.replace("</s>", "<over>")
    only_here = {
        "in the model's config": ({"config.json": {"eos_token_id": 3}}, 3),
        "the first of several": ({"config.json": {"eos_token_id": [2, 3]}}, 2),
        "nowhere": ({}, None),
    }
    failures, fingerprints = [], set()
    for text, cases in ((_WORD_LEVEL, named), (no_name, only_here)):
        for name, (files, expected) in cases.items():
            directory = tmp_path / name.replace(" ", "-")
            directory.mkdir()
            (directory / "tokenizer.json").write_text(text)
            for file, content in files.items():
                (directory / file).write_text(json.dumps(content))
            tokenizer = load_tokenizer(str(directory / "tokenizer.json"))
            fingerprints.add((tokenizer.fingerprint, tokenizer.end_of_document))
            if tokenizer.end_of_document != expected:
                failures.append((name, tokenizer.end_of_document))
    assert failures == []
    assert len({fingerprint for fingerprint, _ in fingerprints}) == len(fingerprints)
