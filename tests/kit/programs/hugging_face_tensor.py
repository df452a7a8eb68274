"""Program: the model types of contract/model.py on one rank and on two ranks; prints the largest differences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shoal_workers.contract.model import TIED_BY_DEFAULT, HuggingFaceConfig, plan_of_hugging_face
from shoal_workers.engine.parallel.tensor import apply_tensor
from shoal_workers.tasks.hf import CausalLM, HuggingFaceLM

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 257,
    "pad_token_id": None,
}


def compare(model_type: str, mesh: DeviceMesh) -> dict[str, float]:
    """Largest differences of the loss and, relative to the gradient's largest element, of any gradient."""
    settings = {"config": {"model_type": model_type, **SIZES}, "seq_len": 16}
    plan = plan_of_hugging_face(HuggingFaceConfig.model_validate(settings))
    assert plan is not None
    whole, cut = (_model(settings) for _ in range(2))
    partial = apply_tensor(cut, plan, mesh)
    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(2))
    losses = [_loss(whole, tokens)]
    losses[0].backward()
    losses.append(_loss(cut, tokens))
    losses[1].backward()
    for parameter in partial:
        dist.all_reduce(parameter.grad)
    theirs = dict(cut.named_parameters())
    found = {name: _difference(parameter.grad, theirs[name].grad) for name, parameter in whole.named_parameters()}
    return {"loss": abs(losses[0].item() - losses[1].item()), "gradient": max(found.values())}


def _model(settings: dict[str, Any]) -> CausalLM:
    torch.manual_seed(1)
    model = HuggingFaceLM(settings, {"corpus": "python-stdlib"}, 0).build_model()
    assert isinstance(model, CausalLM)
    with torch.no_grad():
        for parameter in model.parameters():  # away from ones and zeros, which hide what is wrong
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _loss(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _difference(whole: Any, cut: Any) -> float:
    full = cut.full_tensor() if isinstance(cut, DTensor) else cut
    return float((whole - full).abs().max() / whole.abs().max().clamp_min(1e-3))


def find(_rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return {model_type: compare(model_type, mesh) for model_type in TIED_BY_DEFAULT}


if __name__ == "__main__":
    run_ranks(2, find)
