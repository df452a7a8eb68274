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


def made_of(order: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of equal layers, and an optimizer that has its parameters in this order, as one that is made of a set."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    parameters = list(model.parameters())
    groups = [
        {"params": [parameters[number] for number in order if parameters[number].ndim == ndim]} for ndim in (1, 2)
    ]
    return model, torch.optim.Adam(groups, lr=0.1)


def test_the_state_of_an_optimizer_goes_by_parameter_whatever_the_order_in_its_groups() -> None:
    (model, optimizer), (other, other_optimizer) = made_of([0, 1, 2, 3, 4, 5]), made_of([4, 0, 2, 5, 1, 3])
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    source, target = (
        Tracked({"model": one, "optimizer": of_one}) for one, of_one in ((model, optimizer), (other, other_optimizer))
    )
    through_json(source, target)
    for parameter, counterpart in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], other_optimizer.state[counterpart]["exp_avg"])
    (tensors, tree), (again, tree_again) = source.collect(), target.collect()
    assert tree == tree_again
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert list(target.order.values()) == [*range(6)]


def test_what_a_loop_changes_of_the_settings_of_modules_comes_back_unless_the_program_has_others_now() -> None:
    def made(p: float = 0.5) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(p), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return model

    model, same, other = made(), made(), made(p=0.3)
    source, of_same, of_other = (Tracked({"model": one}) for one in (model, same, other))
    model[0].weight.requires_grad_(True)
    model[1].eval()
    model[1].momentum, model[2].p = 0.01, 0.1
    for target in (of_same, of_other):
        through_json(source, target)
    assert [one.requires_grad for one in same[0].parameters()] == [True, False]
    assert (same[1].training, same[1].momentum, same[2].p, same[2].training) == (False, 0.01, 0.1, True)
    assert (other[1].training, other[2].p) == (False, 0.3)


def test_a_group_that_is_added_later_and_is_not_there_after_a_restore_is_refused_with_the_way_out() -> None:
    (model, optimizer), (other, other_optimizer) = made_of([0, 1, 2, 3]), made_of([0, 1, 2, 3])
    source = Tracked({"model": model, "optimizer": optimizer})
    optimizer.add_param_group({"params": list(model[2].parameters())})
    words = r"run\.track\(optimizer=\.\.\.\): Adam does not take back its state: .* before run\.track\(\)"
    with pytest.raises(ValueError, match=words):
        through_json(source, Tracked({"model": other, "optimizer": other_optimizer}))


def test_a_model_that_is_evaluated_when_it_is_saved_trains_after_a_restore_but_for_the_parts_that_did_not() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, (3, 3)), nn.BatchNorm2d(1), nn.Dropout(0.5))
    tracked = Tracked({"model": model})
    model[1].eval()
    model[2].p = 0.1
    tracked.collect()
    model.eval()
    tensors, tree = tracked.collect()
    fresh = nn.Sequential(nn.Conv2d(1, 1, (3, 3)), nn.BatchNorm2d(1), nn.Dropout(0.5))
    Tracked({"model": fresh}).restore(tensors, json.loads(json.dumps(tree)))
    assert [part.training for part in fresh.modules()] == [True, True, False, True]
    assert fresh[2].p == 0.1 and fresh[0].kernel_size == (3, 3)


def test_the_state_of_an_optimizer_that_saves_by_name_is_as_it_gives_it() -> None:
    class Named(torch.optim.SGD):
        def state_dict(self) -> Any:
            state = super().state_dict()
            return {"state": {}, "param_groups": [{**state["param_groups"][0], "params": ["weight", "bias"]}]}

        def load_state_dict(self, state_dict: Any) -> None:
            assert state_dict["param_groups"][0]["params"] == ["weight", "bias"]

    model = nn.Linear(2, 2)
    tracked = Tracked({"model": model, "optimizer": Named(model.parameters(), lr=0.1)})
    tracked.restore(*tracked.collect())
