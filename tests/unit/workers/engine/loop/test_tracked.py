"""The state of any objects: flat tensors and one tree of plain values, which JSON can carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.checkpoint.save_plan import local_tensor
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


def sharded(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained by one step."""
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_parts_of_a_sharded_model_and_of_its_optimizer_come_back_as_parts(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, optimizer = sharded(mesh)
    other = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh=mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    tensors, tree = Tracked({"model": model, "optimizer": optimizer}, mesh).collect()
    target = Tracked({"model": other, "optimizer": other_optimizer}, mesh)
    shapes = {name: Shape(tuple(one.shape), one.dtype) for name, one in tensors.items()}
    memory = target.targets(shapes, json.loads(json.dumps(tree)))
    assert memory.keys() == tensors.keys()
    for name, one in memory.items():
        assert isinstance(one, DTensor) == isinstance(tensors[name], DTensor), name
        local_tensor(one).copy_(local_tensor(tensors[name]))
    assert isinstance(memory["optimizer/state/0/exp_avg"], DTensor), "no optimizer state was there yet"
    target.restore(memory, tree)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_tensor(before), local_tensor(after))
        moments, moved = optimizer.state[before], other_optimizer.state[after]
        assert all(torch.equal(local_tensor(moments[key]), local_tensor(moved[key])) for key in moments)


def test_a_state_that_was_saved_whole_is_read_into_parts_and_the_other_way_round(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, optimizer = sharded(mesh)
    plain, plain_optimizer, _ = trained()
    whole = Tracked({"model": plain, "optimizer": plain_optimizer}, mesh)
    shapes = {name: Shape(tuple(one.shape), one.dtype) for name, one in whole.collect()[0].items()}
    assert not any(isinstance(one, DTensor) for one in whole.targets(shapes, whole.collect()[1]).values())

    parts = Tracked({"model": model, "optimizer": optimizer}, mesh)
    tensors, tree = parts.collect()
    shapes = {name: Shape(tuple(one.shape), one.dtype) for name, one in tensors.items()}
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    target = Tracked({"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}, mesh)
    assert not any(isinstance(one, DTensor) for one in target.targets(shapes, tree).values())


def test_a_mark_changes_when_a_part_does(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, optimizer = sharded(mesh)
    tracked = Tracked({"model": model, "optimizer": optimizer}, mesh)
    mark = tracked.mark()
    model(torch.ones(1, 3)).sum().backward()
    assert tracked.mark() == mark
    optimizer.step()
    assert tracked.mark() != mark


def test_a_tensor_over_another_mesh_is_refused_with_the_way_out(world: None) -> None:
    mesh, own = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(torch.ones(2, 2), own, [Replicate(), Shard(0)])
    with pytest.raises(
        TypeError, match=r"one\.weight is a DTensor over .* wrap with run\.wrap\(model\), or with fully_"
    ):
        Tracked({"one": Holder({"weight": weight})}, mesh).collect()
    with pytest.raises(TypeError, match=r"one\.weight is a DTensor over"):
        Tracked({"one": Holder({"weight": weight})}).collect()


def test_a_tensor_that_is_split_along_two_axes_is_refused(world: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "shards"))
    weight = distribute_tensor(torch.ones(2, 2), mesh, [Shard(1), Shard(0)])
    with pytest.raises(TypeError, match=r"with the placements .*trains as a task"):
        Tracked({"one": Holder({"weight": weight})}, mesh).collect()


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


def test_a_mark_changes_when_a_tensor_of_any_other_object_does() -> None:
    mean = torch.zeros(2)
    tracked = Tracked({"averages": Holder({"mean": mean, "count": 3})})
    mark = tracked.mark()
    assert tracked.mark() == mark
    mean.add_(1.0)
    assert tracked.mark() != mark
