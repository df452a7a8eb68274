"""Data is compared by content: over ranks, and with that of a checkpoint; the messages name what differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.mixture import TokenDataset
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import Split
from shoal_workers.engine.task.data_identity import (
    DataChange,
    RankData,
    change_since,
    content_hash_of,
    difference,
    differing_rank,
    parts_of,
)


def _ranks(*hashes: str) -> list[RankData]:
    return [RankData(value, f"10.0.0.{n}") for n, value in enumerate(hashes)]


@pytest.mark.parametrize(
    ("hashes", "expected"), [("aaa", None), ("", None), ("aab", 2), ("baa", 0), ("ab", 1), ("abcb", 0)]
)
def test_the_rank_that_differs_is_the_one_outside_the_majority(hashes: str, expected: int | None) -> None:
    assert differing_rank(_ranks(*(hashes or ["", ""]))) == expected


def _dataset(root: Path, name: str, changed: bool) -> TokenDataset:
    directory = root / name
    directory.mkdir()
    for number in range(12):
        text = "\n".join(f"document {number}, line {line}" for line in range(60))
        (directory / f"{number:02d}.txt").write_text(text + (" other" if changed and number == 7 else ""))
        os.utime(directory / f"{number:02d}.txt", (1, len(name)))
    config = TextDataConfig(paths=(str(directory),), cache_dir=str(root / f"{name}-cache"), validation_fraction=0)
    return TokenDataset(prepare_corpus(config, lambda _: None, shard_bytes=6000), Split.TRAIN, 16)


def test_the_message_names_ranks_hosts_and_the_files_that_differ(tmp_path: Path) -> None:
    same, copy, other = (_dataset(tmp_path, name, name == "other") for name in ("same", "copy", "other"))
    assert content_hash_of(same) == content_hash_of(copy) != content_hash_of(other)
    ranks = _ranks(content_hash_of(same), content_hash_of(copy), content_hash_of(other))
    assert differing_rank(ranks) == 2
    message = str(difference(ranks, [parts_of(one) for one in (same, copy, other)], 2))
    assert message.startswith("Rank 2 on 10.0.0.2 reads other data than rank 0 on 10.0.0.0: ")
    differing = [f"tokens-{n:05d}.bin" for n in range(9) if f"tokens-{n:05d}.bin" in message]
    assert len(differing) == 1, "only the shard with the changed file"
    assert f"{tmp_path}/other/07.txt" in message
    assert f"{tmp_path}/same/07.txt" in message
    assert "01.txt" not in message


def test_a_dataset_without_parts_is_named_by_its_hash() -> None:
    message = str(difference(_ranks("a1", "b2"), [{}, {}], 1))
    assert message.startswith("Rank 1 on 10.0.0.1 reads other data than rank 0 on 10.0.0.0. Content hashes: b2 and a1.")
    assert "Content hashes: none and a1." in str(difference(_ranks("a1", ""), [{}, {}], 1))


def test_only_known_content_is_compared_with_a_checkpoint() -> None:
    assert change_since("a", "b") == DataChange("a", "b")
    for saved, now in (("a", "a"), (None, "a"), ("", "a"), ("a", ""), (7, "a")):
        assert change_since(saved, now) is None
    assert content_hash_of([1, 2]) == ""
