"""A data set of shards on local disk: files, patterns, folders, what `datasets` saved; decoded by the user."""

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.shards import samples
from shoal_workers.data.errors import DataError, MissingTextError
from shoal_workers.data.sharded_files import ShardedFiles


def _jsonl(path: Path, first: int, num: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": first + n}) + "\n" for n in range(num)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven samples in three files, in this order."""
    _jsonl(tmp_path / "data" / "a.jsonl", 0, 3)
    _jsonl(tmp_path / "data" / "b" / "a.jsonl", 3, 1)
    _jsonl(tmp_path / "data" / "c.jsonl", 4, 3)
    (tmp_path / "data" / "README.md").write_text("of another kind")
    _jsonl(tmp_path / "data" / "_hidden.jsonl", 99, 1)
    return tmp_path / "data"


def _ids(data: ShardedFiles) -> list[int]:
    return [data[index]["id"] for index in range(len(data))]


def test_files_patterns_and_folders_are_read_in_the_order_of_their_names(folder: Path) -> None:
    assert _ids(ShardedFiles(folder)) == [0, 1, 2, 3, 4, 5, 6]
    assert _ids(ShardedFiles(str(folder / "[ac].jsonl"))) == [0, 1, 2, 4, 5, 6]
    assert _ids(ShardedFiles([folder / "c.jsonl", str(folder / "b")])) == [4, 5, 6, 3]


def test_a_sample_that_does_not_exist_is_an_index_error(folder: Path) -> None:
    data = ShardedFiles(folder)
    for index in (7, -1):
        with pytest.raises(IndexError, match=f"sample {index} of 7"):
            data[index]


def test_a_folder_with_an_index_has_its_shards_in_its_order(tmp_path: Path) -> None:
    """None is opened to count its samples."""
    copied = Path(shutil.copytree(samples.FILES / "mds-zstd", tmp_path / "mds"))
    first = copied / "shard.00000.mds.zstd"
    first.rename(tmp_path / "away")
    data = ShardedFiles(copied)
    assert len(data) == 5
    assert data[4]["number"] == 2
    with pytest.raises(MissingTextError, match=r"shard\.00000\.mds\.zstd does not exist"):
        data[0]
    (tmp_path / "away").rename(first)
    assert data[0]["number"] == -2


def test_a_shard_that_its_index_does_not_know_is_refused(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(samples.FILES / "mds-plain", tmp_path / "mds"))
    first, *_, last = sorted(copied.glob("*.mds"))
    shutil.copy(last, first)
    index = json.loads((copied / "index.json").read_text())
    index["shards"][0]["samples"] += 1
    (copied / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"samples, and .*index\.json names .* write both again"):
        ShardedFiles(copied)[0]


def test_what_datasets_saved_is_read_without_the_library() -> None:
    assert "datasets" not in sys.modules
    data = ShardedFiles(samples.FILES / "saved")
    assert [data[index] for index in range(len(data))] == samples.saved()
    assert "datasets" not in sys.modules


def test_columns_that_datasets_does_not_show_are_left_out(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(samples.FILES / "saved", tmp_path / "saved"))
    state = json.loads((copied / "state.json").read_text()) | {"_format_columns": ["label", "text"]}
    (copied / "state.json").write_text(json.dumps(state))
    assert ShardedFiles(copied)[3] == {"label": 1, "text": "row 3"}


def test_a_folder_of_several_splits_says_which_it_has(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(MissingTextError, match=r"has the splits train, test\. Name one of them: .*/train"):
        ShardedFiles(tmp_path)


def test_nothing_that_can_be_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(MissingTextError, match="means no file"):
        ShardedFiles(tmp_path / "*.tar")
    with pytest.raises(MissingTextError, match=r"no file whose name says a format .* no index\.json"):
        ShardedFiles(tmp_path)


def _tensor(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(sample["id"]) * 10


def _refuses_five(sample: dict[str, Any]) -> int:
    return 1 // (sample["id"] - 5)


def test_decode_makes_the_samples(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_decoders.py").write_text("def ten_times(sample):\n    return sample['id'] * 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(ShardedFiles(folder, decode=_tensor)[6], torch.tensor(60))
    assert ShardedFiles(folder, decode="my_decoders:ten_times")[6] == 60


def test_what_decode_raises_names_the_file_and_the_sample(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        ShardedFiles(folder, decode=_refuses_five)[5]
    assert raised.value.__notes__ == [f"Raised by decode for sample 1 of {folder / 'c.jsonl'}."]


@pytest.mark.parametrize("name", ["no_such_module:f", "json:no_such_function", "json", "json:__doc__"])
def test_a_decode_that_is_no_function_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"decode '{name}'"):
        ShardedFiles(folder, decode=name)


def test_the_content_hash_is_that_of_the_content_and_its_order(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    data, copied = ShardedFiles(folder), ShardedFiles(other)
    assert copied.content_hash == data.content_hash
    assert ShardedFiles([folder / "c.jsonl", folder / "a.jsonl"]).content_hash != data.content_hash
    (other / "c.jsonl").write_text((folder / "c.jsonl").read_text().replace("5", "7"))
    changed = ShardedFiles(other)
    assert changed.content_hash != data.content_hash
    parts = zip(data.content_parts().values(), changed.content_parts().values(), strict=True)
    assert [one == other for one, other in parts] == [True, True, False]


def test_the_hash_of_a_large_file_sees_its_length_its_begin_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps({"id": 1}).encode() + b"\n"
    hashes = set()
    for content in (line * 200_000, line * 200_001, b'{"id": 2}\n' + line * 199_999, line * 199_999 + b'{"id": 2}\n'):
        path.write_bytes(content)
        hashes.add(ShardedFiles(path).content_hash)
    assert len(hashes) == 4


def test_only_so_many_shards_are_open(tmp_path: Path) -> None:
    for number in range(12):
        _jsonl(tmp_path / f"{number:02d}.jsonl", number, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    data = ShardedFiles(tmp_path, most_open=4)
    assert sorted(_ids(data)) == list(range(12))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 4


def test_it_can_be_sent_to_another_process(folder: Path) -> None:
    data = ShardedFiles(folder)
    assert data[0]["id"] == 0
    assert _ids(pickle.loads(pickle.dumps(data))) == [0, 1, 2, 3, 4, 5, 6]
