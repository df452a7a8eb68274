"""What torchrun's variables say about ranks on several nodes, and about their GPUs."""

from collections.abc import Sequence
from typing import Any

import pytest

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.spec import JobSpec
from shoal_workers.script.environment import MEDIA, MediaTarget, Place, environment_of


def environment(
    rank: int, places: Sequence[Place], own: dict[str, str] | None = None, *, generation: int = 1, **spec: Any
) -> dict[str, str]:
    assignment = Assignment(
        job_id="job-7",
        attempt=1,
        generation=generation,
        rank=rank,
        layout=Layout(dp_replicate=len(places)),
        store_host="10.0.0.1",
        store_port=1,
        restore_from=None,
    )
    script = {"file": "train.py", "launcher": spec.pop("launcher", "torchrun")}
    return environment_of(
        own or {},
        JobSpec.model_validate({"script": script, **spec}),
        assignment,
        places,
        checkpoint_dir="/checkpoints/job-7",
        hook="@hook",
        interface="eth1",
        ray_address="10.0.0.2:6379",
    )


PLACES = (
    Place(node_id="node-b", devices="4", store_port=29500),
    Place(node_id="node-b", devices="GPU-17"),
    Place(node_id="node-a", devices="0"),
    Place(node_id="node-b", devices="2"),
)


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "group_rank", "devices"),
    [(0, "0", "3", "0", "4,GPU-17,2"), (2, "0", "1", "1", "0"), (3, "2", "3", "0", "4,GPU-17,2")],
)
def test_ranks_are_counted_within_their_node(
    rank: int, local_rank: str, local_world_size: str, group_rank: str, devices: str
) -> None:
    found = environment(rank, PLACES)
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), "4")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (local_rank, local_world_size)
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == (group_rank, "2")
    assert found["CUDA_VISIBLE_DEVICES"] == devices, "cuda:LOCAL_RANK is the worker's own"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_restarts_are_counted_from_0_and_limited_by_the_jobs_budget() -> None:
    found = environment(0, PLACES, generation=3, retry={"max_recoveries": 9})
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "9")
    assert found["TORCHELASTIC_RUN_ID"] == "job-7"


def test_without_gpus_the_visible_devices_are_the_workers() -> None:
    places = (Place(node_id="node", devices=""), Place(node_id="node", devices=""))
    assert "CUDA_VISIBLE_DEVICES" not in environment(0, places)
    assert environment(0, places, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""


def test_what_the_spec_or_the_node_sets_is_kept() -> None:
    own = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "ib0", "TOKEN": "secret", "SHOAL_FORK_SERVER": "/tmp/x"}
    found = environment(0, PLACES, own)
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"], found["TOKEN"]) == ("7", "ib0", "secret")
    assert "SHOAL_FORK_SERVER" not in found
    found = environment(0, PLACES, worker={"cpus": 3.5})
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("3", "eth1")


def test_accelerate_also_gets_its_own_variables() -> None:
    found = environment(1, PLACES, {"ACCELERATE_MIXED_PRECISION": "bf16"}, launcher="accelerate")
    assert found["RANK"] == "1"
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16", "code.env counts more than the default"
    assert (found["ACCELERATE_DYNAMO_BACKEND"], found["ACCELERATE_USE_CPU"]) == ("NO", "True")
    assert environment(1, PLACES, launcher="accelerate", worker={"gpus": 1})["ACCELERATE_USE_CPU"] == "False"


def test_a_script_that_is_not_distributed_learns_nothing_of_ranks() -> None:
    found = environment(0, (Place(node_id="node", devices="", store_port=1),), launcher="python")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & found.keys()
    assert (found["SHOAL_CHECKPOINT_DIR"], found["SHOAL_HOOK"]) == ("/checkpoints/job-7", "@hook")


def test_a_place_survives_the_way_through_the_store() -> None:
    assert [Place.model_validate_json(place.model_dump_json()) for place in PLACES] == [*PLACES]


def test_deepspeeds_launcher_names_nodes_and_processes_in_its_own_way() -> None:
    found = environment(2, PLACES, launcher="deepspeed_env")
    assert (found["LOCAL_SIZE"], found["CROSS_RANK"], found["CROSS_SIZE"]) == ("1", "1", "2")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("2", "0", "4")


@pytest.mark.parametrize(
    ("launcher", "address"), [("ray_train", "10.0.0.2:6379"), ("torchrun", None), ("python", None)]
)
def test_a_script_of_ray_train_finds_the_cluster_of_its_worker(launcher: str, address: str | None) -> None:
    found = environment(0, PLACES[:1], launcher=launcher)
    assert found.get("RAY_ADDRESS") == address
    assert ("RANK" in found) == (launcher != "python")


def test_a_rank_whose_media_are_kept_learns_their_directory() -> None:
    target = MediaTarget.model_validate_json(environment(0, PLACES, generation=3)[MEDIA])
    assert (target.root, target.attempt, target.generation, target.rank) == ("/checkpoints/job-7", 1, 3, 0)
    assert MEDIA not in environment(1, PLACES)
    of_all = environment(1, PLACES, media={"ranks": "all", "max_steps": 7})
    assert MediaTarget.model_validate_json(of_all[MEDIA]).settings.max_steps == 7
    assert MEDIA not in environment(0, PLACES, media={"enabled": False})
