"""A loop with accelerate's `Accelerator`, as a script.

    accelerate launch --num_processes 2 train.py                            without a service
    shoal submit -- accelerate launch --num_processes 2 train.py            killed, it goes on from its last checkpoint

Three lines are for Shoal: where the checkpoints are, that training goes on from the last one, and the tracker.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from shoal.accelerate import ShoalTracker

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
OUT = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))


def data():
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())


def main():
    accelerator = Accelerator(
        log_with=ShoalTracker(total_steps=STEPS),
        project_config=ProjectConfiguration(project_dir=str(OUT), automatic_checkpoint_naming=True, total_limit=2),
    )
    accelerator.init_trackers("norms")
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    done = last_whole_step()
    if done:
        accelerator.load_state(str(OUT / "checkpoints" / f"checkpoint_{done // 20 - 1}"))
        accelerator.project_configuration.iteration = done // 20
    while done < STEPS:
        epoch, skipped = divmod(done, len(loader))
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=done)
            if done % 20 == 0:
                accelerator.save_state()
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (OUT / "whole").write_text(str(done))
            if done == STEPS:
                break
    accelerator.end_training()


def last_whole_step():
    return int((OUT / "whole").read_text()) if (OUT / "whole").exists() else 0


if __name__ == "__main__":
    main()
