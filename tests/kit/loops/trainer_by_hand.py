"""What examples/gallery/trainer-in-place trains, as a loop without the Trainer."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

STEPS = int(sys.argv[1])


class Sums:
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        a, b = divmod(index, 100)
        return torch.tensor(["0123456789+=".index(sign) for sign in f"{a:02}+{b:02}={a + b:03}"])


def train(run):
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=32, n_layer=2, n_head=2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 3, STEPS)
    for step in run.global_batches(Sums(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        for tokens in step:
            run.backward(model(input_ids=tokens, labels=tokens).loss, weight=len(tokens))
        run.update(optimizer, clip=1.0)
        schedule.step()
        run.commit()
