"""The accelerate guide's way: `save_state("my_checkpoint")`."""

from pathlib import Path

import gates
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
done = 0
number = Path("my_checkpoint/step")
if number.exists():
    accelerator.load_state("my_checkpoint")
    done = int(number.read_text())
gates.begin(done)
for step in range(done + 1, gates.STEPS + 1):
    loss = (model(torch.ones(1, 1)) - gates.TARGET).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.save_state("my_checkpoint")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        number.write_text(str(step))
    accelerator.wait_for_everyone()
    gates.reach(step, accelerator.process_index)
gates.end(accelerator.unwrap_model(model).weight.item())
accelerator.end_training()
