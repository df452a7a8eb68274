"""The Trainer of Hugging Face transformers as a loop in place: a killed worker costs one step at most.

    shoal submit train.py --workers 1:4 --follow -- 200          also: python train.py

Against a script with `Trainer`, what is new is the function, `run` and `global_size`, and that nothing is saved and
loaded: Shoal keeps the state.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import shoal
import shoal.hf

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


class Sums(torch.utils.data.Dataset):
    """Lines like 07+05=012, one token for each sign."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        a, b = divmod(index, 100)
        tokens = torch.tensor(["0123456789+=".index(sign) for sign in f"{a:02}+{b:02}={a + b:03}"])
        return {"input_ids": tokens, "labels": tokens}


def train(run):
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=3,
        logging_steps=5,
        use_cpu=run.device.type == "cpu",
        disable_tqdm=True,
        report_to="none",
    )
    shoal.hf.InPlaceTrainer(model, arguments, train_dataset=Sums(), run=run, global_size=32).train()


if __name__ == "__main__":
    shoal.run(train)
