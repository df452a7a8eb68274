"""Lightning's Trainer as a loop in place: a killed worker costs one step at most.

    shoal submit train.py --workers 1:4 --follow -- 200          also: python train.py

Against a script with Lightning, what is new is the function, `run` and the strategy, and that nothing is saved and
loaded: Shoal keeps the state.
"""

import sys

import lightning as L
import torch

import shoal
from shoal.lightning import InPlaceStrategy

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


class Norms(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(run):
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())
    trainer = L.Trainer(
        max_steps=STEPS,
        strategy=InPlaceStrategy(run, global_size=32),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Norms(), torch.utils.data.DataLoader(data, batch_size=8))


if __name__ == "__main__":
    shoal.run(train)
