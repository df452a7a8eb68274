"""Bytes beside the weights, compared with those that real optimizers of a real, tiny model keep."""

from typing import Any

import pytest
import torch

from kit.worlds.hugging_face_configs import small_config
from shoal_service.planner import rank
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.holding import ALL_ADAMW, Kind, holding_of, num_adapter_params, tensors_of
from shoal_service.planner.memory import BytesPart, host_need
from shoal_service.planner.shape import shape_of
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HuggingFaceConfig
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.named_optimizer import named_optimizer
from shoal_workers.engine.step.parameter_groups import freeze, groups_of_spec
from shoal_workers.tasks.transformer import Transformer

DENSE = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 32, "num_layers": 2, "seq_len": 8}
EXPERTS = {
    **DENSE,
    "num_layers": 3,
    "num_experts": 4,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "expert_hidden_dim": 24,
    "tied_head": False,
}
_TEXT = {"corpus": "python-stdlib"}


def _spec(model: dict[str, Any], **sections: Any) -> JobSpec:
    return parse_spec({"stop": {"steps": 1}, "data": _TEXT, "model": model, **sections})


def _model(model: dict[str, Any]) -> torch.nn.Module:
    return Transformer(LanguageModelConfig(**model), 257)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_tensors_are_those_of_the_model(model: dict[str, Any]) -> None:
    real = {name: tuple(one.shape) for name, one in _model(model).named_parameters()}
    config = LanguageModelConfig(**model)
    assert {one.name: one.shape for one in tensors_of(config, 257)} == real
    assert sum(one.numel for one in tensors_of(config, 257, by_name=False)) == sum(
        one.numel for one in tensors_of(config, 257)
    )
    experts = {name for name in real if ".experts." in name}
    assert {one.name for one in tensors_of(config, 257) if one.kind is Kind.EXPERTS} == experts


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam with amsgrad": {"name": "adam", "args": {"amsgrad": True}},
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "args": {"momentum": 0.9}},
    "lion": {"name": "lion"},
    "adagrad": {"name": "adagrad"},
    "rmsprop": {"name": "rmsprop", "args": {"centered": True}},
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
    "adamw with averages": {"ema_decay": 0.99},
    "by path": {"name": "torch.optim.NAdam"},
    "frozen": {"groups": [{"match": "embedding.*", "frozen": True}, {"match": "blocks.0.*", "frozen": True}]},
    "muon on few": {"name": "muon", "groups": [{"match": "*.attention.*", "muon": False}]},
}


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_gradients_are_those_of_the_optimizer(name: str, model: dict[str, Any]) -> None:
    spec = _spec(model, optimizer=OPTIMIZERS[name])
    module = _model(model)
    freeze(module, spec.optimizer)
    groups = groups_of_spec(module, spec.optimizer)
    optimizer = named_optimizer(Assembly(Layout(), (module,)), spec.optimizer, groups)
    trained = [one for one in module.parameters() if one.requires_grad]
    for one in trained:
        one.grad = torch.randn_like(one)
    optimizer.step()
    held = {
        id(parameter): sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
        for parameter, state in optimizer.state.items()
    }
    shape = shape_of(spec)
    assert shape is not None
    holding = holding_of(spec, shape)
    for kind, is_expert in ((holding.dense, False), (holding.experts, True)):
        own = [one for name, one in module.named_parameters() if (".experts." in name) is is_expert]
        total = sum(one.numel() for one in own)
        assert total * kind.state_bytes == pytest.approx(sum(held.get(id(one), 0) for one in own), rel=1e-6)
        if total:
            assert total * kind.trained == pytest.approx(sum(one.numel() for one in own if one.requires_grad))


def test_snapshots_and_log_follow_the_optimizer_and_what_is_frozen() -> None:
    shape = shape_of(_spec(DENSE))
    lion = host_need(_spec(DENSE, optimizer={"name": "lion"}), 1000, 0, shape)
    assert (lion.snapshots, lion.log) == (8000, 24 * 4 * 1000)
    half = {"groups": [{"match": "blocks.*", "frozen": True}]}
    frozen = host_need(_spec(DENSE, optimizer=half), 1000, 0, shape)
    whole = host_need(_spec(DENSE), 1000, 0, shape)
    assert frozen.snapshots < whole.snapshots == 12000
    assert frozen.log < 0.7 * whole.log
    assert holding_of(_spec(DENSE), shape) == ALL_ADAMW


def _hugging_face(name: str, **model: Any) -> JobSpec:
    config = small_config(name)
    return _spec({"config": config, "seq_len": 32, **model}, task="shoal_workers.tasks.hf:HuggingFaceLM")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_families_with_experts_have_their_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = _hugging_face(name)
    shape = shape_of(spec)
    assert shape is not None
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.model["config"]))
    experts = sum(one.numel() for key, one in real.named_parameters() if ".experts." in key and "bias" not in key)
    assert shape.num_moe * shape.moe.expert_params == experts
    assert shape.params == pytest.approx(sum(one.numel() for one in real.parameters()), rel=0.03)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "o_proj", "query_key_value"]])
def test_adapters_are_all_that_lora_trains(name: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    from shoal_workers.tasks.lora import add_adapters

    assert peft
    config = small_config(name)
    linear = {"llama": "q_proj", "mixtral": "q_proj", "gpt_neox": "query_key_value", "deepseek_v3": "o_proj"}[name]
    lora = {"r": 4, "target_modules": targets if targets == "all-linear" else [linear]}
    settings = HuggingFaceConfig(config=config, lora=lora)  # type: ignore[arg-type]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert settings.lora is not None
    add_adapters(network, settings.lora)
    real = sum(one.numel() for one in network.parameters() if one.requires_grad)
    assert num_adapter_params(settings) == real
    spec = _hugging_face(name, lora=lora)
    shape = shape_of(spec)
    assert shape is not None
    holding = holding_of(spec, shape)
    assert holding.dense.trained * shape.params == pytest.approx(real)
    assert holding.experts.trained == holding.experts.state_bytes == 0
    need = host_need(spec, shape.params, 0, shape)
    assert need.snapshots < 0.5 * host_need(_hugging_face(name), shape.params, 0, shape).snapshots


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_over_ranks_need_less_and_a_frozen_base_takes_less_time(name: str) -> None:
    batch = {"global_size": 8, "micro_size": 1}
    whole = _hugging_face(name).model_copy(update={"batch": _spec(DENSE, batch=batch).batch})
    ranking = rank(whole, 4, PROFILES["h100"], top=100)
    found = {one.layout.ep: one for one in ranking.predictions if one.layout.num_shards == 4}
    assert found[2].layout.shard is found[1].layout.shard
    assert found[2].bytes[BytesPart.GATHERED] < found[1].bytes[BytesPart.GATHERED]
    adapted = _hugging_face(name, lora={"r": 2}).model_copy(update={"batch": whole.batch})
    [one] = rank(adapted, 1, PROFILES["h100"]).predictions
    [other] = rank(whole, 1, PROFILES["h100"]).predictions
    assert one.seconds[SecondsPart.COMPUTE] < other.seconds[SecondsPart.COMPUTE]
    assert one.seconds[SecondsPart.UPDATE] < 0.2 * other.seconds[SecondsPart.UPDATE]
    assert one.bytes[BytesPart.GRADIENTS] < other.bytes[BytesPart.GRADIENTS]
    assert one.bytes[BytesPart.PARAMETERS] == other.bytes[BytesPart.PARAMETERS]
