"""What a machine has: devices, quotas and the variable of CUDA, in directories of the test."""

from pathlib import Path

import pytest

from shoal_service.cluster.hardware import TooManyNodes, find, require_cpus


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    directory = tmp_path / "dev"
    directory.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (directory / name).touch()
    return directory


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 3), ("0,1", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3", 3), ("GPU-8a6", 1)]
)
def test_gpus_are_devices_that_cuda_may_see(dev: Path, visible: str | None, gpus: int) -> None:
    assert find({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, dev).gpus == gpus


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert find({}, tmp_path / "nowhere").gpus == 0


def test_more_nodes_than_cpus_are_refused_with_the_way_out() -> None:
    require_cpus(4, 4, found=True)
    with pytest.raises(TooManyNodes, match=r"this machine has 2\. Use at most 2 nodes, or --num-cpus 4"):
        require_cpus(4, 2, found=True)
    with pytest.raises(TooManyNodes, match="--num-cpus gives 3"):
        require_cpus(4, 3, found=False)
