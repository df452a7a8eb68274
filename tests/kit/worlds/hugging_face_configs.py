"""Small configs of every family of transformers, with what has an effect of its own (windows, norms of heads)."""

from pathlib import Path
from typing import Any

from shoal_workers.contract.families import FAMILIES

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_inner": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "phi": {"qk_layernorm": True},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "num_local_experts": 4, "mlp_only_layers": [0]},
    "deepseek_v2": {**_EXPERTS, **_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
}
"""What a family's config has beside SIZES."""


def small_config(family: str) -> dict[str, Any]:
    """As in config.json."""
    config = {"model_type": family, **SIZES, **_OF_FAMILY.get(family, {})}
    for name, own in FAMILIES[family].names.items():
        if name in config and own != name:
            config.setdefault(own, config.pop(name))
    return config


def save_small_llama(directory: Path, **changes: Any) -> None:
    """Writes a small model of transformers whose weights, also those of norms, are not those of a start. `changes`:
    keys of its config."""
    import torch
    import transformers

    sizes = {key: value for key, value in SIZES.items() if key not in ("head_dim", "pad_token_id")}
    torch.manual_seed(5)
    network = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **sizes, **changes)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    network.save_pretrained(directory)
