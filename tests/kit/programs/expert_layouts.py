"""Program of four gloo processes: a mixture of experts over several ranks, compared with the same one on one rank.

    python expert_layouts.py STORE_FILE

Every data rank has its own batch, of a size of its own. Rank 0 prints one JSON line {case: largest difference over all
ranks}: outputs, gradients of the inputs and of every parameter, expert loads. The ranks are forked from one process
that has imported everything and has no thread yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import largest, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.experts import apply_experts
from shoal_workers.engine.parallel.head_tail import own_part
from shoal_workers.tasks.feed_forward import MixtureOfExperts, set_share_of_step, sum_load

PLAN = ParallelPlan(experts="feed_forward.experts", num_experts=8)
DIM, TOKENS = 16, 8


class Net(nn.Module):
    """Has no code for ranks."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.feed_forward = MixtureOfExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.feed_forward(x)
        return out


def net(**changes: Any) -> Net:
    """The same weights everywhere."""
    settings = {"dim": DIM, "num_experts": 8, "num_heads": 2, "expert_hidden_dim": 12, **changes}
    torch.manual_seed(0)
    model = Net(LanguageModelConfig.model_validate(settings))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch(data_rank: int) -> tuple[Tensor, Tensor]:
    """A batch (data_rank + 1, T, D), and the gradient of what comes out of it."""
    torch.manual_seed(100 + data_rank)
    shape = (data_rank + 1, TOKENS, DIM)
    return torch.randn(shape), torch.randn(shape)


class Undivided:
    """What one process computes on each data rank's batch, with gradients summed over `ranks`."""

    def __init__(self, model: Net, ranks: range) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        for rank in ranks:
            x, into = batch(rank)
            x.requires_grad_()
            set_share_of_step(model, 1 / len(ranks))
            self.outputs[rank] = model(x)
            self.outputs[rank].backward(into)
            assert x.grad is not None
            self.inputs[rank] = x.grad
        self.parameters = {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest one, of the largest value."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def compare(
    mesh: DeviceMesh,
    prepare: Callable[[Net], object] = lambda model: None,
    around: Callable[[Net, DeviceMesh | None], None] | None = None,
    run: Callable[[Net, Tensor], Tensor] = lambda model, x: model(x),
    **changes: Any,
) -> float:
    """Over `mesh` of dims data, ep, tp. `around` wraps in FSDP over data what is left, in one process as in many."""
    axes = [mesh[name] if mesh[name].size() > 1 else None for name in ("data", "ep", "tp")]
    data, ep, tp = axes
    num_data = mesh["data"].size() * mesh["ep"].size()
    data_rank = mesh["data"].get_local_rank() * mesh["ep"].size() + mesh["ep"].get_local_rank()

    one, many = net(**changes), net(**changes)
    prepare(one)
    prepare(many)
    expected = Undivided(one, range(num_data))

    has_merge = isinstance(many.feed_forward.merge, nn.Module)
    terms = apply_experts(many, PLAN, ep, tp)
    if around is not None:
        around(many, data)
    x, into = batch(data_rank)
    x.requires_grad_()
    is_cut = tp is not None and has_merge and hasattr(many.feed_forward.experts, "hidden_dims")
    part = into.chunk(tp.size(), 1)[tp.get_local_rank()] if is_cut and tp is not None else into
    desired = expected.outputs[data_rank]
    if is_cut and tp is not None:
        desired = desired.chunk(tp.size(), 1)[tp.get_local_rank()]
    set_share_of_step(many, 1 / num_data)
    found = run(many, x)
    found.backward(part.contiguous())
    assert x.grad is not None
    if is_cut and tp is not None:  # as the style `gather` and the trainer do
        for gradient in [x.grad, *(parameter.grad for parameter in terms)]:
            assert gradient is not None
            dist.all_reduce(gradient, group=tp.get_group())
    differences = [difference(found, desired), difference(x.grad, expected.inputs[data_rank])]
    for name, parameter in many.named_parameters():
        gradient = whole(parameter.grad)
        is_expert = ".experts." in name
        if around is None:  # what FSDP would sum
            gradient = gradient.clone()
            for axis in (data, None if is_expert else ep):
                if axis is not None:
                    dist.all_reduce(gradient, group=axis.get_group())
        reference = expected.parameters[name]
        assert reference is not None
        differences.append(difference(gradient, reference))
    if many.feed_forward.router.balance == "bias":
        sum_load(many, dist.all_reduce)
        load = many.feed_forward.router.expert_load // mesh["tp"].size()
        differences.append(float((load - one.feed_forward.router.expert_load).abs().max()))
    return max(differences)


def over_context(mesh: DeviceMesh, ep: DeviceMesh | None, **changes: Any) -> float:
    """Two data ranks, each batch cut along the sequence over cp; experts over all ranks or over none."""
    cp, data_rank = mesh["cp"], mesh["data"].get_local_rank()
    one, many = net(**changes), net(**changes)
    expected = Undivided(one, range(2))
    apply_experts(many, PLAN, ep, None, cp)

    def own(tensor: Tensor) -> Tensor:
        return own_part(tensor, cp.get_local_rank(), cp.size(), 1)

    x, into = batch(data_rank)
    x = own(x).requires_grad_()
    set_share_of_step(many, 1 / 2)
    found = many(x)
    found.backward(own(into))
    assert x.grad is not None
    differences = [
        difference(found, own(expected.outputs[data_rank])),
        difference(x.grad, own(expected.inputs[data_rank])),
    ]
    for name, parameter in many.named_parameters():
        gradient, reference = whole(parameter.grad), expected.parameters[name]
        assert reference is not None
        if ep is None or ".experts." not in name:
            dist.all_reduce(gradient)
        differences.append(difference(gradient, reference))
    return max(differences)


def only_two_experts(model: Net) -> None:
    """All tokens go to experts 5 and 6: most ranks get none."""
    model.feed_forward.router.expert_bias[5:7] = 100.0


def without_merge(model: Net) -> None:
    feed_forward = model.feed_forward
    del feed_forward.merge
    feed_forward.__dict__["merge"] = lambda routed: routed


def fully_sharded(model: Net, data: DeviceMesh | None) -> None:
    """Experts over what ep leaves, along the dim that is neither theirs nor their width's; the rest over all ranks."""
    assert data is not None
    experts = model.feed_forward.experts
    dims = {id(parameter): 3 - experts.hidden_dims[name] for name, parameter in experts.named_parameters()}
    fully_shard(experts, mesh=data, shard_placement_fn=lambda parameter: Shard(dims[id(parameter)]))
    root = data._get_root_mesh()
    fully_shard(model, mesh=root["data", "ep"]._flatten("shards"))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    assert model.feed_forward.experts.gate.placements == (Shard(1), Shard(0))


def recomputed(model: Net, x: Tensor) -> Tensor:
    out = checkpoint(model, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def cases() -> Iterator[tuple[str, float]]:
    def mesh(data: int, ep: int, tp: int) -> DeviceMesh:
        return init_device_mesh("cpu", (data, ep, tp), mesh_dim_names=("data", "ep", "tp"))

    ep2, ep4, ep2_tp2, tp2, tp4 = mesh(2, 2, 1), mesh(1, 4, 1), mesh(1, 2, 2), mesh(2, 1, 2), mesh(1, 1, 4)
    meshes = {"ep2": ep2, "ep4": ep4, "ep2 x tp2": ep2_tp2, "tp2": tp2, "tp4": tp4}
    for name, where in meshes.items():
        yield name, compare(where)
        yield f"{name}, three experts", compare(where, top_k=3)
        yield f"{name}, ranks without tokens", compare(where, only_two_experts)
        yield f"{name}, uneven width", compare(where, expert_hidden_dim=7)
        yield f"{name}, balance loss", compare(where, balance="loss", balance_rate=0.3)
        yield f"{name}, capacity", compare(where, capacity_factor=0.8)
        yield f"{name}, recomputed", compare(where, run=recomputed)
    for name in ("ep2 x tp2", "tp2"):
        yield f"{name}, added up at the experts", compare(meshes[name], without_merge)
    yield "tp4, width less than tp", compare(tp4, expert_hidden_dim=2)
    yield "ep2, shared expert", compare(ep2, num_shared_experts=1)
    yield "ep2, fully sharded", compare(ep2, around=fully_sharded, num_shared_experts=1)
    cp2 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    for name, ep in (("cp2", None), ("cp2, ep4", ep4["ep"])):
        yield name, over_context(cp2, ep, capacity_factor=0.8)
        yield f"{name}, balance loss", over_context(cp2, ep, balance="loss", balance_rate=0.3, capacity_factor=0.5)
    yield "initial weights", initial_weights(ep2_tp2)


def initial_weights(mesh: DeviceMesh) -> float:
    one, many = net(), net()
    apply_experts(many, PLAN, mesh["ep"], mesh["tp"])
    gate = many.feed_forward.experts.gate
    assert isinstance(gate, DTensor)
    assert gate.placements == (Shard(0), Shard(2))
    assert gate.to_local().untyped_storage().nbytes() * 4 == one.feed_forward.experts.gate.untyped_storage().nbytes()
    assert Replicate() not in many.feed_forward.experts.down.placements  # type: ignore[attr-defined]
    return max(difference(whole(a), b) for a, b in zip(many.parameters(), one.parameters(), strict=True))


if __name__ == "__main__":
    run_ranks(4, lambda _rank: largest(cases()))
