from pathlib import Path
from typing import Any

import pytest

from shoal_workers.checkpoint.spec_note import NAME, SpecChanged, differences, note_spec
from shoal_workers.contract.spec import JobSpec


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 4}, "task": "mine:Task", "model": {"width": 8}, **changes})


def test_the_same_computation_may_continue(tmp_path: Path) -> None:
    note_spec(str(tmp_path / "new"), spec(), may_differ=False)
    same = spec(name="other", elasticity={"max_workers": 2}, checkpoint={"keep": 7})
    note_spec(str(tmp_path / "new"), same, may_differ=False)


def test_another_spec_is_refused_with_its_keys_until_it_is_allowed(tmp_path: Path) -> None:
    root = str(tmp_path)
    note_spec(root, spec(), may_differ=False)
    changed = spec(model={"depth": 3}, optimizer={"lr": 0.5}, seed=7)
    for _ in range(2):  # a refused spec is not noted
        with pytest.raises(SpecChanged) as refused:
            note_spec(root, changed, may_differ=False)
        assert refused.value.keys == ("model.depth", "model.width", "optimizer.lr", "seed")
    note_spec(root, changed, may_differ=True)
    note_spec(root, changed, may_differ=False)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_note_that_cannot_be_read_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    note_spec(str(tmp_path), spec(), may_differ=False)
    with pytest.raises(SpecChanged):
        note_spec(str(tmp_path), spec(seed=1), may_differ=False)


def test_a_key_that_a_later_release_adds_does_not_differ() -> None:
    document = spec().model_dump(mode="json")
    old = {key: value for key, value in document.items() if key != "deterministic"}
    assert differences(old, document | {"deterministic": True}) == ()
