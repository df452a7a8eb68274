"""Low-rank adapters (Hu et al. 2021) in a model of transformers, by the library `peft`.

Hides what peft does to a model: each target layer becomes one with a frozen `base_layer`, and two small layers beside
it, `lora_A.default` and `lora_B.default`. Everything else is frozen. The names of the base model's tensors differ from
those in its files by `base_layer` alone (BASE_RENAMES); an export has peft's own names.

The weights of adapters come from torch's generator, as peft draws them: A uniform, B zero. Used by the task.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal_workers.contract.families import taken_for_experts
from shoal_workers.contract.hugging_face import LoraConfig

ADAPTER = "default"
BASE_RENAMES = [[r"\.base_layer\.", "."]]
"""Names of the model with adapters -> of the base model."""
_EXPORT_RENAMES = [["^", "base_model.model."], [rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1."]]
"""Names of the adapters' tensors -> what `PeftModel.from_pretrained` reads."""
_ADAPTERS = r"\.lora_[AB]\."


def add_adapters(network: Any, settings: LoraConfig) -> None:
    """Change a model of transformers in place; afterwards only its adapters require a gradient.

    Raises:
        ImportError: peft is not installed.
        ValueError: no layer has the name of a target.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ImportError(f"model.lora needs peft ({error}): pip install 'shoal[hf]'.") from error
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(_peft_config(network, settings), network, adapter_name=ADAPTER)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def outputs_of_adapters(network: Any) -> list[nn.Module]:
    """Return the layer of each adapter whose output is added to that of the layer beside it."""
    return [module for name, module in network.named_modules() if name.endswith(f".lora_B.{ADAPTER}")]


def export_of_adapters(network: Any, settings: LoraConfig, base: str | None) -> dict[str, Any]:
    """What `shoal export` writes of a model with adapters: the files that peft loads beside the model in `base`."""
    config = _peft_config(network, settings).to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    known = {key: value for key, value in config.items() if isinstance(value, str | int | float | list | dict | None)}
    return {"config": known, "renames": _EXPORT_RENAMES, "only": _ADAPTERS}


def _peft_config(network: Any, settings: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    config = PeftLoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        task_type="CAUSAL_LM",
        bias="none",
        fan_in_fan_out=any(_is_transposed(module) for module in network.modules()),
    )
    config.target_modules = _targets(network, settings)  # of the constructor it would be a set, in any order
    return config


def _targets(network: Any, settings: LoraConfig) -> list[str]:
    """Last parts of the names of the layers, sorted. ValueError: there is no such layer, or it cannot have an
    adapter."""
    head = network.get_output_embeddings()
    names = [
        name.removesuffix(".base_layer")
        for name, module in network.named_modules()
        if (isinstance(module, nn.Linear) or _is_transposed(module)) and module is not head and ".lora_" not in name
    ]
    model_type = network.config.model_type
    known = sorted({name.rpartition(".")[2] for name in names} - taken_for_experts(model_type))
    if settings.target_modules == "all-linear":
        return known
    for target in settings.target_modules:
        where = f"model.lora.target_modules names {target!r}"
        if target.rpartition(".")[2] in taken_for_experts(model_type):
            raise ValueError(
                f"{where}, which in a model with experts peft takes for their weights. Those cannot have adapters "
                f"here: name some of {', '.join(known)}."
            )
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(f"{where}, and no linear layer of the model has this name: {', '.join(known)}.")
    return sorted(settings.target_modules)


def _is_transposed(module: nn.Module) -> bool:
    """The linear layer of GPT-2, which has its weight transposed."""
    return type(module).__name__ == "Conv1D"
