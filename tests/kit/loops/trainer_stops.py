"""The Trainer of transformers in place, with early stopping, a counter of the user's, and the best model at the end.
The metric gets worse from the second evaluation on."""

import json
import sys
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

import shoal
import shoal.hf

STEPS_PER_EPOCH, PATIENCE = 4, 3


class Counter(TrainerCallback):
    """A callback that does not export its state."""

    def __init__(self):
        self.epochs, self.norms = [], []

    def on_epoch_end(self, args, state, control, **_):
        self.epochs.append(state.epoch)

    def on_log(self, args, state, control, logs=None, **_):
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": (self.weight * x - labels).square().mean(), "logits": self.weight * x}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * STEPS_PER_EPOCH

    def __getitem__(self, index):
        return {"x": torch.tensor([1.0]), "labels": torch.tensor([3.0])}


def train(run):
    torch.manual_seed(0)
    counter = Counter()
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=9,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        logging_steps=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = Line()
    trainer = shoal.hf.InPlaceTrainer(
        model,
        arguments,
        run=run,
        global_size=8,
        train_dataset=Data(),
        eval_dataset=torch.utils.data.Subset(Data(), range(2)),
        compute_metrics=lambda _: {"accuracy": 1.0 / (1 + len(counter.epochs))},
        callbacks=[counter, EarlyStoppingCallback(PATIENCE)],
    )
    trainer.train()
    state = trainer.state
    ended = [run.step, counter.epochs, state.best_global_step, round(model.weight.item(), 4)]
    logs = [[round(norm, 4) for norm in counter.norms], len(state.log_history)]
    trainer.save_model(f"{sys.argv[1]}-saved-by-{run.rank}")
    if run.is_rank_zero:
        Path(sys.argv[1]).write_text(json.dumps(ended + logs))


if __name__ == "__main__":
    shoal.run(train)
