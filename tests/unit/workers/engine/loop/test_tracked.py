"""The state of any objects: flat tensors and one tree of plain values, which JSON can carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.engine.loop.tracked import Tracked


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def through_json(source: Tracked, target: Tracked) -> None:
    tensors, tree = source.collect()
    copies = {name: value.clone() for name, value in tensors.items()}
    target.restore(copies, json.loads(json.dumps(tree, allow_nan=False)))


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_model_optimizer_and_schedule_come_back_although_the_new_optimizer_has_no_state_yet() -> None:
    model, optimizer, schedule = trained()
    other = nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    other_schedule = torch.optim.lr_scheduler.StepLR(other_optimizer, 2)
    source = Tracked({"model": model, "optimizer": optimizer, "schedule": schedule})
    through_json(source, Tracked({"model": other, "optimizer": other_optimizer, "schedule": other_schedule}))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other_schedule.state_dict() == schedule.state_dict()
    before, after = optimizer.state_dict(), other_optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"] and before["state"].keys() == after["state"].keys()
    for number, values in before["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in values.items())


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.5, None, True, "x"], 3: {"b": (1, (2, 3))}},
        {"not finite": [float("inf"), float("-inf")], "exact": 0.1 + 0.2},
        {},
        [],
    ],
)
def test_plain_values_keep_their_types_and_bits(state: Any) -> None:
    target = Holder(None)
    through_json(Tracked({"one": Holder(state)}), Tracked({"one": target}))
    assert target.state == state and repr(target.state) == repr(state)


def test_what_is_no_plain_value_is_refused_with_its_path() -> None:
    with pytest.raises(TypeError, match=r"run\.track\(\): one\.deep\.1 is object, and a state consists of tensors"):
        Tracked({"one": Holder({"deep": [1, object()]})}).collect()


def test_a_model_of_which_each_rank_has_a_part_is_refused_with_the_other_doors(world: None) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"model\.weight is a DTensor.* train as a script .* or as a task"):
        Tracked({"model": model}).collect()


def test_an_object_without_the_two_methods_is_refused() -> None:
    with pytest.raises(TypeError, match=r"run\.track\(step=\.\.\.\): int has no state_dict\(\)"):
        Tracked({"step": 3})  # type: ignore[dict-item]


def test_the_state_of_other_objects_is_refused_by_name() -> None:
    tensors, tree = Tracked({"model": Holder({})}).collect()
    with pytest.raises(ValueError, match=r"run\.track\(\) has net, and the state to go on from has model"):
        Tracked({"net": Holder({})}).restore(tensors, tree)


def test_a_mark_changes_with_every_change_of_what_is_tracked_and_with_nothing_else() -> None:
    model, optimizer, schedule = trained()
    norm, counter = nn.BatchNorm1d(3), Holder({"seen": 3})
    tracked = Tracked({"model": model, "norm": norm, "optimizer": optimizer, "schedule": schedule, "counter": counter})
    marks = [tracked.mark()]

    def changed() -> bool:
        marks.append(tracked.mark())
        return bool(marks[-1] != marks[-2])

    model(torch.ones(2, 3)).sum().backward()
    assert not changed(), "a gradient is no state"
    norm(torch.randn(4, 3))
    assert changed(), "statistics of a forward pass"
    counter.state = {"seen": 4}
    assert changed()
    optimizer.param_groups[0]["lr"] = 0.5
    assert changed()
    schedule.step()
    assert changed()
    optimizer.step()
    assert changed()
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert changed()
    assert not changed()
