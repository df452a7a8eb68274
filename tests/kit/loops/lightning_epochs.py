"""Lightning in place for some epochs, with callbacks that have a state: the library's early stopping, and a counter of
the user's. The metric gets worse from the third epoch on."""

import json
import sys
from pathlib import Path

import lightning as L
import torch

import shoal
from shoal.lightning import InPlaceStrategy

EPOCHS, STEPS_PER_EPOCH, PATIENCE = 9, 4, 3


class Counter(L.Callback):
    """A callback without state_dict."""

    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.current_epoch)


class Line(L.LightningModule):
    def __init__(self, counter):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.counter = counter
        self.validations = 0

    def training_step(self, batch):
        return (self.layer(batch[0]) - 3).square().mean()

    def validation_step(self, batch):
        self.validations += 1
        self.log("badness", float(max(2, self.validations)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def train(run):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.arange(8 * STEPS_PER_EPOCH).float().view(-1, 1) / 32)
    counter = Counter()
    stops = L.pytorch.callbacks.EarlyStopping("badness", patience=PATIENCE)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        strategy=InPlaceStrategy(run, global_size=8),
        callbacks=[stops, counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Line(counter)
    trainer.fit(
        module,
        torch.utils.data.DataLoader(data, 2),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1, 1)), 1),
    )
    trainer.save_checkpoint(f"{sys.argv[1]}-saved-by-{run.rank}")
    if run.is_rank_zero:
        ended = [run.step, trainer.current_epoch, counter.epochs, module.validations, trainer.fit_loop.total_batch_idx]
        Path(sys.argv[1]).write_text(json.dumps(ended))


if __name__ == "__main__":
    shoal.run(train)
