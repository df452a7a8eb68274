"""`shoal plan`: a table, JSON, exit codes; measured profiles are used."""

from pathlib import Path
from typing import Any

import pytest

from shoal_service.control.planning import ProfileError, load_profiles, save_profile
from shoal_service.planner.gpus import CPU

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_plan_prints_a_table_for_a_thousand_gpus(offline: Any, tmp_path: Path) -> None:
    ran = offline("plan", str(EXAMPLES / "llama-70b.yaml"), "--gpus", "1024", "--state-dir", str(tmp_path))
    assert ran.code == 0
    assert "1,024 ranks of h100, 70.6 B parameters, 512 micro-batches of 1 a step = 4,194,304 tokens" in ran.out
    for word in (
        "layout",
        "GiB",
        "tokens/s",
        "MFU",
        "bubble",
        "choice: ",
        "least_sharded",
        "why not tp: ",
        "error bar of a step: 15%",
    ):
        assert word in ran.out


def test_json_lists_the_number_of_layouts_given_by_top(offline: Any, spec_file: Path, tmp_path: Path) -> None:
    found = offline(
        "plan", str(spec_file), "--workers", "3", "--top", "2", "--json", "--state-dir", str(tmp_path)
    ).json()
    assert found["choice"]["name"] == "dp3"
    assert len(found["ranking"]["predictions"]) == 2


def test_without_a_number_the_plan_is_for_max_workers_of_the_spec(
    offline: Any, spec_file: Path, tmp_path: Path
) -> None:
    desired = ("--set", "elasticity.max_workers=4", "--set", "elasticity.min_workers=1")
    found = offline("plan", str(spec_file), *desired, "--json", "--state-dir", str(tmp_path)).json()
    assert found["ranking"]["world_size"] == 4


def test_a_plan_without_a_fitting_layout_ends_with_1_and_a_hint(offline: Any, tmp_path: Path) -> None:
    arguments = ("--gpus", "16", "--gpu", "l40s", "--state-dir", str(tmp_path))
    ran = offline("plan", str(EXAMPLES / "llama-70b.yaml"), *arguments)
    assert ran.code == 1
    assert "What would fit: 64 GPUs" in " ".join(ran.out.split())


def test_a_plan_beside_another_layout_and_why_not_the_other_axes(offline: Any, tmp_path: Path) -> None:
    plan = ("plan", str(EXAMPLES / "llama-70b.yaml"), "--gpus", "64", "--state-dir", str(tmp_path))
    ran = offline(*plan, "--compare", "pp2 x tp8")
    assert ran.code == 0
    for words in ("difference", "pp2 x fsdp4 x tp8", "memory, GiB", "why not ep: no legal layout of 64 ranks uses it"):
        assert words in ran.out
    for wrong in ("tp3", "xy8", "tp", "tp0"):
        assert offline(*plan, "--compare", wrong).code == 2, wrong


@pytest.mark.parametrize(
    "wrong", [("--workers", "2", "--gpus", "2"), ("--workers", "0"), ("--gpus", "2", "--gpu", "x")]
)
def test_contradictory_options_are_a_usage_error(offline: Any, spec_file: Path, wrong: tuple[str, ...]) -> None:
    assert offline("plan", str(spec_file), *wrong).code == 2


def test_a_measured_profile_is_used(offline: Any, spec_file: Path, tmp_path: Path) -> None:
    mine = CPU.model_copy(update={"name": "this-machine", "measured": True})
    save_profile(tmp_path, mine)
    assert load_profiles(tmp_path)["this-machine"] == mine
    found = offline("plan", str(spec_file), "--workers", "2", "--json", "--state-dir", str(tmp_path)).json()
    assert found["ranking"]["profile"] == "this-machine"


def test_a_damaged_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "broken.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"broken\.json is not a hardware profile"):
        load_profiles(tmp_path)


@pytest.mark.parametrize("nodes", ["8,x", "0", "4,4/", "8"])
def test_node_sizes_that_are_none_or_have_too_little_room_are_a_usage_error(
    offline: Any, spec_file: Path, nodes: str
) -> None:
    assert offline("plan", str(spec_file), "--workers", "9", "--nodes", nodes).code == 2
