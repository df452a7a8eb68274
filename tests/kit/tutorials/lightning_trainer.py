"""Lightning's way: `lightning_logs/version_N/checkpoints`, and the newest checkpoint there."""

from pathlib import Path

import gates
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch):
        return (self.weight * batch[0] - gates.TARGET).square().mean()

    def on_train_batch_end(self, *_):
        self.trainer.strategy.barrier()
        gates.reach(self.trainer.global_step, self.global_rank)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


saved = Path("lightning_logs").glob("version_*/checkpoints/*.ckpt")
last = max(saved, key=lambda path: int(path.stem.partition("step=")[2]), default=None)
gates.begin(int(last.stem.partition("step=")[2]) if last else 0)
trainer = L.Trainer(
    max_steps=gates.STEPS,
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    callbacks=[ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Line()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=1)
trainer.fit(model, data, ckpt_path=last)
gates.end(model.weight.item())
