"""Lightning's Trainer, as a script.

    torchrun --nproc-per-node 2 train.py                  without a service
    shoal submit train.py --workers 2 --follow            killed, it goes on from its last checkpoint

Three lines are for Shoal: where the checkpoints are, that training goes on from the last one, and the logger. The
Trainer takes the processes that are there, so it gets their number.
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from shoal.lightning import ShoalLogger

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
OUT = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))


class Norms(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(0)
    x = torch.randn(320, 8)
    data = torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=per_node,
        num_nodes=world_size // per_node,
        plugins=[TorchElasticEnvironment()] if "RANK" in os.environ else None,
        logger=ShoalLogger(total_steps=STEPS),
        log_every_n_steps=5,
        callbacks=[ModelCheckpoint(OUT, save_last=True, every_n_epochs=1)],
        enable_progress_bar=False,
    )
    last = OUT / "last.ckpt"
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    trainer.fit(Norms(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
