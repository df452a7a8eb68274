"""The DDP tutorial's way: `snapshot.pt` in the working directory."""

from pathlib import Path

import gates
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, done = dist.get_rank(), 0
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
if Path("snapshot.pt").exists():
    snapshot = torch.load("snapshot.pt")
    model.load_state_dict(snapshot["MODEL_STATE"])
    done = snapshot["STEPS_RUN"]
gates.begin(done)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(done + 1, gates.STEPS + 1):
    loss = (ddp(torch.ones(1, 1)) - gates.TARGET).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({"MODEL_STATE": model.state_dict(), "STEPS_RUN": step}, "snapshot.pt")
    dist.barrier()
    gates.reach(step, rank)
gates.end(model.weight.item())
del ddp
dist.destroy_process_group()
