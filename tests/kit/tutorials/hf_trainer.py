"""The Trainer's way: `trainer_output`, and the newest checkpoint there."""

from pathlib import Path

import gates
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": (self.weight * x - labels).square().mean()}


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return {"x": torch.ones(1), "labels": torch.full((1,), gates.TARGET)}


class Gate(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        gates.reach(state.global_step, args.process_index)


arguments = TrainingArguments(
    max_steps=gates.STEPS,
    save_steps=gates.HALF,
    learning_rate=0.1,
    optim="sgd",
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
gates.begin(int(last.rpartition("-")[2]) if last else 0)
model = Line()
Trainer(model, arguments, train_dataset=Ones(), callbacks=[Gate()]).train(resume_from_checkpoint=last)
gates.end(model.weight.item())
