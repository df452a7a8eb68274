"""A damaged checkpoint is either loaded as it was written or refused with the name of the damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch
from shoal_workers.checkpoint.index import ShardIndex, index_name, payload_name
from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed

pytestmark = pytest.mark.dist


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "weight": torch.randn(37, 11, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(3.0),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([2**40, -1]),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A committed checkpoint of two ranks: rank 0 holds everything, rank 1 (a later pipeline stage) something more."""
    path = tmp_path / str(CheckpointName(3, 1, 1))
    reported: list[SavedPart | SaveFailed] = []
    for rank, state in enumerate([_state(), {"other": torch.arange(9)}]):
        writer = CheckpointWriter()
        writer.save(
            state,
            directory=str(path),
            rank=rank,
            world_size=2,
            generation=1,
            step=3,
            extra={"rank": rank},
            on_done=reported.append,
            owns_replicated=True,
        )
        writer.close()
    parts = [part for part in reported if isinstance(part, SavedPart)]
    write_marker(str(path), marker_of(parts, job_id="job", attempt=1, now=0.0))
    return path


def _blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in _state().items()}


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_undamaged_checkpoint_loads_bit_equal(directory: Path) -> None:
    state = _blank()
    assert load(state, directory=str(directory)) == {"rank": 0}
    assert all(torch.equal(state[name], tensor) for name, tensor in _state().items())


def test_tensors_are_filled_in_place(directory: Path) -> None:
    state = _blank()
    memory = {name: tensor.data_ptr() for name, tensor in state.items()}
    load(state, directory=str(directory))
    assert memory == {name: tensor.data_ptr() for name, tensor in state.items()}


def test_tensors_that_are_not_contiguous_are_filled(directory: Path) -> None:
    weight = torch.zeros(11, 37).t()
    load({"weight": weight}, directory=str(directory))
    assert torch.equal(weight, _state()["weight"])


def test_parameters_that_require_gradients_are_filled_without_history(directory: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(37, 11))
    load({"weight": weight}, directory=str(directory))
    assert weight.grad_fn is None
    assert torch.equal(weight.detach(), _state()["weight"])


def test_plain_tensor_of_another_rank_is_found(directory: Path) -> None:
    state = {"other": torch.zeros(9, dtype=torch.int64)}
    load(state, directory=str(directory))
    assert torch.equal(state["other"], torch.arange(9))


def test_each_flipped_byte_of_a_tensor_is_found(directory: Path) -> None:
    for item in ShardIndex.from_json((directory / index_name(0)).read_bytes()).items:
        if item.nbytes == 0:
            continue
        for position in (item.file_offset, item.file_offset + item.nbytes - 1):
            _flip(directory / payload_name(0), position)
            with pytest.raises(DamagedCheckpoint, match=f"0x[0-9a-f]+ for {item.fqn} .*, its index says 0x[0-9a-f]+"):
                load(_blank(), directory=str(directory))
            _flip(directory / payload_name(0), position)


def test_damage_in_a_tensor_that_is_not_requested_is_not_read(directory: Path) -> None:
    _flip(directory / payload_name(1), 0)
    load(_blank(), directory=str(directory))


@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_byte_of_any_index_that_is_needed_is_found(directory: Path, rank: int) -> None:
    _flip(directory / index_name(rank), 40)
    state = {**_blank(), "other": torch.zeros(9, dtype=torch.int64)}
    with pytest.raises(DamagedCheckpoint, match=rf"shard-0000{rank}\.json has crc32 .* the marker says"):
        load(state, directory=str(directory))


def test_damage_in_an_index_that_is_not_needed_is_not_read(directory: Path) -> None:
    _flip(directory / index_name(1), 40)
    load(_blank(), directory=str(directory))


def test_flipped_byte_of_the_marker_is_found(directory: Path) -> None:
    _flip(directory / MARKER_NAME, 100)
    with pytest.raises(DamagedCheckpoint, match=r"COMMIT\.json"):
        load(_blank(), directory=str(directory))


@pytest.mark.parametrize("name", [payload_name(0), payload_name(1), index_name(0), index_name(1), MARKER_NAME])
def test_missing_file_is_found(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        load(_blank(), directory=str(directory))


@pytest.mark.parametrize("name", [payload_name(0), payload_name(1), index_name(0), index_name(1)])
@pytest.mark.parametrize("change", ["one byte less", "one byte more", "empty"])
def test_file_of_another_length_is_found(directory: Path, name: str, change: str) -> None:
    content = (directory / name).read_bytes()
    spoilt = {"one byte less": content[:-1], "one byte more": content + b"\0", "empty": b""}[change]
    (directory / name).write_bytes(spoilt)
    with pytest.raises(DamagedCheckpoint, match=f"{name} is {len(spoilt)} bytes long, the marker says {len(content)}"):
        load(_blank(), directory=str(directory))


def test_extra_files_do_no_harm(directory: Path) -> None:
    (directory / "shard-00002.bin").write_bytes(b"of a rank that is not in the marker")
    (directory / "shard-00000.bin.writing").write_bytes(b"left by a killed process")
    load(_blank(), directory=str(directory))


def test_torn_save_is_never_loaded(directory: Path) -> None:
    (directory / MARKER_NAME).unlink()
    with pytest.raises(DamagedCheckpoint, match="never committed"):
        load(_blank(), directory=str(directory))


def test_a_directory_that_this_node_does_not_see_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone is not there on .* Make the job's storage available"):
        load(_blank(), directory=str(tmp_path / "gone"))


def test_storage_that_does_not_answer_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        load(_blank(), directory=str(tmp_path / "file" / "step"))


def test_state_that_the_checkpoint_lacks_is_named(directory: Path) -> None:
    state = {"weight": torch.zeros(37, 12), "half": torch.zeros(5), "unknown": torch.zeros(1)}
    with pytest.raises(StateMismatch) as caught:
        load(state, directory=str(directory))
    assert caught.value.problems == (
        "weight is torch.float32 (37, 11) in it, torch.float32 (37, 12) here",
        "half is torch.bfloat16 (5,) in it, torch.float32 (5,) here",
        "it has no unknown",
    )


def test_state_without_memory_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="weight is on the meta device"):
        load({"weight": torch.zeros(37, 11, device="meta")}, directory=str(directory))


def test_a_checkpoint_contains_no_pickle(directory: Path) -> None:
    for path in directory.iterdir():
        assert path.suffix in (".bin", ".json")
        if path.suffix == ".json":
            assert path.read_bytes()[:1] == b"{"
    content = (directory / payload_name(0)).read_bytes()
    assert content.startswith(_state()["weight"].numpy().tobytes())
