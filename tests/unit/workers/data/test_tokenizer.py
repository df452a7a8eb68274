"""Bytes are tokens as they are; a tokenizer file that cannot be used is refused with the way out."""

from __future__ import annotations

import importlib.util
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
