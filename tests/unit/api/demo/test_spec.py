from pathlib import Path

import yaml

from shoal_api.demo.spec import DEMO_SPEC, KILL_AT_STEP, KILL_RANK, WORKERS, Scenario, make_script
from shoal_workers.contract.checks.spec_errors import parse_spec

EXAMPLE = Path(__file__).parents[4] / "examples" / "byte-lm.yaml"


def test_the_demo_is_the_example_with_more_checkpoints() -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    assert {**example, "checkpoint": None} == {**DEMO_SPEC, "checkpoint": None}
    assert DEMO_SPEC["checkpoint"]["every_steps"] < example["checkpoint"]["every_steps"]


def test_the_demo_spec_is_accepted_and_the_kill_is_within_the_run() -> None:
    spec = parse_spec(DEMO_SPEC)
    assert spec.stop.steps is not None
    assert spec.checkpoint.every_steps is not None
    assert spec.checkpoint.every_steps < KILL_AT_STEP < spec.stop.steps // 2
    assert 0 < KILL_RANK < WORKERS - 1


def test_the_number_of_steps_can_be_given_and_more_of_them_change_no_learning_rate() -> None:
    spec = make_script(Scenario.RELAYOUT, 60).spec
    assert spec["stop"] == {"steps": 60}
    assert parse_spec(spec).schedule.steps == 60
