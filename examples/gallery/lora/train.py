"""LoRA with peft: a language model is frozen, and small matrices beside its weights are trained.

    shoal submit train.py --workers 1:4 --follow -- 200          also: python train.py, torchrun ... train.py

Only the small matrices are tracked, so snapshots and checkpoints are small. The frozen model is loaded anew in each
life of the loop.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


class Sums:
    """Lines like 07+05=012, one token for each sign."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        a, b = divmod(index, 100)
        return torch.tensor(["0123456789+=".index(sign) for sign in f"{a:02}+{b:02}={a + b:03}"])


class Adapter:
    """The part of a model of peft that is trained."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_peft_model_state_dict(self.model)

    def load_state_dict(self, state):
        set_peft_model_state_dict(self.model, state)


def train(run):
    torch.manual_seed(5)
    sizes = {"vocab_size": 12, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    base = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))  # yours comes from from_pretrained
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
    model.to(run.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.track(adapter=Adapter(model), optimizer=optimizer)
    model.train()
    for tokens in run.batches(Sums(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        run.backward(model(input_ids=tokens, labels=tokens).loss, weight=tokens.numel())
        run.steps(optimizer, clip=1.0)


if __name__ == "__main__":
    shoal.run(train)
