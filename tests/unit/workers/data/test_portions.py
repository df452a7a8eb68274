"""Text that is divided between nodes gives the documents of one process, in its order, from any position on."""

import gzip
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.documents import Position, read_documents
from shoal_workers.data.errors import BadRowError
from shoal_workers.data.portions import Portions, divided
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenizer import ByteTokenizer, DocumentEncoder, EncodedDocument

ConfigOf = Callable[..., TextDataConfig]
PORTION_BYTES = 700_000
ENCODER = DocumentEncoder(ByteTokenizer(), 0.3)


@pytest.fixture
def config(tmp_path: Path, config_of: ConfigOf) -> TextDataConfig:
    """Small files, a text of several portions, rows without text at the begin, within and at the end of files, an empty
    file, and a compressed one."""
    texts = tmp_path / "texts"
    texts.mkdir()
    draw = random.Random(7)
    for number in range(9):
        (texts / f"a{number}.txt").write_text(f"small {number}\n" * draw.randint(1, 9000))
    lines = (f"{n} " + "ä" * draw.randint(1, 300) + "\n" for n in range(12_000))
    (texts / "b-large.txt").write_text("".join(lines))
    (texts / "c-empty.txt").write_text("")
    for name, rows in (("d.jsonl", 3000), ("e.jsonl", 10), ("f.jsonl", 2000)):
        content = [json.dumps({"text": f"row {n} " * 40} if n % 7 else {"other": n}) for n in range(rows)]
        (texts / name).write_text("\n".join([*content, '{"other": 1}']))
    (texts / "g.txt.gz").write_bytes(gzip.compress(("packed " * 300_000).encode()))
    return config_of(texts, bad_rows="skip")


def _sequential(sources: list[SourceFile], config: TextDataConfig, start: Position = Position()) -> list[Any]:  # noqa: B008
    return [_plain(one) for one in ENCODER.encode_all(read_documents(sources, start, config))]


def _plain(one: EncodedDocument) -> Any:
    return one.text.tokens.tobytes(), one.text.split, one.end


def _portions(directory: Path, sources: list[SourceFile], config: TextDataConfig, machine: str) -> Portions:
    return Portions(directory, sources, config, machine=machine, portion_bytes=PORTION_BYTES, advanced=lambda _: None)


def _never() -> None:
    raise AssertionError("no other process works here")


def test_portions_follow_each_other_and_a_large_text_is_divided(config: TextDataConfig) -> None:
    sources = find_sources(config)
    found = divided(sources, PORTION_BYTES)
    assert [one.number for one in found] == list(range(len(found)))
    assert found[0].first == (0, 0) and found[-1].end == (len(sources), 0)
    assert all(one.end == following.first for one, following in itertools.pairwise(found))
    assert all(one.first < one.end for one in found)
    assert sum(one.num_bytes for one in found) == sum(source.num_bytes for source in sources)
    large = next(n for n, source in enumerate(sources) if source.place.endswith("b-large.txt"))
    assert sum(one.first[0] == large and one.first[1] > 0 for one in found) == sources[large].num_bytes // PORTION_BYTES


@pytest.mark.parametrize("helped", ["none", "all", "some"])
@pytest.mark.parametrize("max_bytes", [None, 3_000_000])
def test_documents_and_positions_are_those_of_one_process(
    helped: str, max_bytes: int | None, config: TextDataConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"max_bytes": max_bytes})
    sources = find_sources(config)
    expected = _sequential(sources, config)
    draw = random.Random(3)
    starts = [Position(), *(one[2] for one in draw.sample(expected, 4)), expected[-1][2]]
    for number, start in enumerate(starts):
        directory = tmp_path / f"corpus{number}"
        directory.mkdir()
        holder, helper = (_portions(directory, sources, config, machine) for machine in ("a", "b"))
        holder.hold()
        documents = holder.encoded_from(start, ENCODER.encode_all, _never)
        found = [_plain(one) for one in (next(documents, None),) if one is not None]  # now it says where it is
        if helped != "none":
            while helper.help(ENCODER.encode_all) and (helped == "all" or draw.random() < 0.7):
                pass
        found += map(_plain, documents)
        assert found == expected[len(expected) - len(_sequential(sources, config, start)) :]
        holder.remove()
        assert list(directory.iterdir()) == []


def test_a_process_of_the_same_machine_does_not_help(config: TextDataConfig, tmp_path: Path) -> None:
    sources = find_sources(config)
    holder, waiting = (_portions(tmp_path, sources, config, "a") for _ in range(2))
    assert not waiting.help(ENCODER.encode_all), "nobody prepares"
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    next(documents)
    assert not waiting.help(ENCODER.encode_all)
    assert len(list(documents)) + 1 == len(_sequential(sources, config)) and holder.num_others == 0


@pytest.mark.parametrize("suffix", ["tokens", "part"])
def test_a_damaged_portion_is_encoded_again(suffix: str, config: TextDataConfig, tmp_path: Path) -> None:
    sources = find_sources(config)
    holder, helper = (_portions(tmp_path, sources, config, machine) for machine in ("a", "b"))
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    found = [_plain(next(documents))]
    while helper.help(ENCODER.encode_all):
        pass
    damaged = sorted((tmp_path / "portions").glob(f"*.{suffix}"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert found + list(map(_plain, documents)) == _sequential(sources, config)


def test_a_row_without_text_is_refused_in_its_place_by_the_holder(config: TextDataConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"bad_rows": "refuse"})
    sources = find_sources(config)
    holder, helper = (_portions(tmp_path, sources, config, machine) for machine in ("a", "b"))
    holder.hold()
    documents = holder.encoded_from(Position(), ENCODER.encode_all, _never)
    next(documents)
    while helper.help(ENCODER.encode_all):
        pass
    with pytest.raises(BadRowError, match=r"d\.jsonl, line 1:"):
        list(documents)
