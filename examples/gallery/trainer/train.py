"""The Trainer of Hugging Face transformers, as a script.

    torchrun --nproc-per-node 2 train.py                  without a service
    shoal submit train.py --workers 2 --follow            killed, it goes on from its last checkpoint

Three lines are for Shoal: where the checkpoints are, that training goes on from the last whole one, and the tracker.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import shoal.hf  # noqa: F401, it gives report_to="shoal" its meaning

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
OUT = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))


class Sums(torch.utils.data.Dataset):
    """Lines like 07+05=012, one token for each sign."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        a, b = divmod(index, 100)
        tokens = torch.tensor(["0123456789+=".index(sign) for sign in f"{a:02}+{b:02}={a + b:03}"])
        return {"input_ids": tokens, "labels": tokens}


def last_checkpoint():
    """The newest one that is whole: trainer_state.json is the file that the Trainer writes last."""
    whole = [state.parent for state in OUT.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(OUT),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=20,
        save_total_limit=2,
        report_to="shoal",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=Sums()).train(resume_from_checkpoint=last_checkpoint())


if __name__ == "__main__":
    main()
