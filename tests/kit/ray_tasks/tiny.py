"""A user's task whose jobs take seconds, with the faults of `data.strikes`. Imports nothing from Shoal.

A strike is {"at": ..., "rank": ..., "n": ..., "do": ...}:

    at   step     in the forward pass of step n (1, 2, ...), in the middle of the step
         save     when the state after step n is collected for a checkpoint, before a byte of it is written
         build    when this process builds its model for the n-th time: after the rendezvous, before the restore
         prepare  when the n-th process of the job prepares; it has no rank yet
    rank the rank of the strike; absent: every rank
    do   kill     SIGKILL this process, once per strike
         hold     make the file NAME.reached, wait for NAME.go; once. NAME is AT-N or AT-N-RANK
         block    make the file NAME.reached, then hang in native code that holds the interpreter's lock; once
         mark     make the file NAME.reached
         raise    ValueError, each time
         print    a line, each time
         garble   print and raise text that is no UTF-8, each time
         flip     a bit of this rank's part of a parameter, once
         disk     OSError EIO, as from a disk that fails, once

`data.waves` [4, 6]: the first four processes become ready together, and so do the fifth and the sixth. Otherwise a busy
machine would decide with how many of them a group forms.
"""

import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

NO_UTF_8 = "caf\udce9.txt"
"""As os.listdir gives the name of such a file."""


class Points(torch.utils.data.Dataset):
    """Sample i is a point and a number, both functions of i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = torch.sin(torch.arange(1, 9) * (index + 1.0))
        return x, torch.stack([x[:3].sum(), x[3:].prod(), x.max()])


class Tiny:
    def __init__(self, *, model, data, seed):
        self.gate = Path(data["gate"])
        self.strikes = data.get("strikes", [])
        self.waves = data.get("waves", [])
        self.step_s = data.get("step_s", 0.0)
        self.has_metrics = data.get("metrics", False)
        self.validates = data.get("validates", False)
        self.builds = 0
        self.optimizer = None
        self.struck_in = None

    def arrive(self):
        """Each process of the job on its own, so not in `prepare`, which one process of a node does alone."""
        n = 1
        while not self._claim(f"prepared-{n}"):
            n += 1
        self._strike("prepare", n)
        last_of_wave = next((last for last in self.waves if n <= last), n)
        while not (self.gate / f"prepared-{last_of_wave}").exists():
            time.sleep(0.01)

    def build_model(self):
        self.builds += 1
        self._strike("build", self.builds)
        model = nn.Sequential(nn.Linear(8, 21), nn.GELU(), nn.Dropout(0.1), nn.Linear(21, 3))
        model.register_state_dict_post_hook(lambda *_: self._strike("save", self._completed_steps()))
        return model

    def build_optimizer(self, model, settings):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
        return self.optimizer

    def build_dataset(self, split):
        if split != "train":
            return Points(20) if self.validates else None
        self.arrive()
        return Points(50)

    def loss(self, model, batch):
        now = (self.builds, self._completed_steps() + 1)
        is_proof = self.optimizer is None  # of the layout, before the model that is trained is built
        if now != self.struck_in and not is_proof:  # the first micro-batch of the step
            self.struck_in = now
            time.sleep(self.step_s)
            self._strike("step", now[1])
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        return (loss, {"loss/double": 2 * loss, "size": len(x)}) if self.has_metrics else loss

    def _completed_steps(self):
        """The current step. The task does not receive it, but its optimizer counts steps, also across restores."""
        states = list(self.optimizer.state.values()) if self.optimizer is not None else []
        return int(states[0]["step"]) if states else 0

    def _strike(self, at, n):
        rank = dist.get_rank() if dist.is_initialized() else None
        for strike in self.strikes:
            if strike["at"] != at or strike["n"] != n or strike.get("rank", rank) != rank:
                continue
            name = "-".join(str(part) for part in (at, n, strike.get("rank")) if part is not None)
            match strike["do"]:
                case "kill":
                    if self._claim(f"{name}.killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                case "hold":
                    if self._claim(f"{name}.reached"):
                        while not (self.gate / f"{name}.go").exists():
                            time.sleep(0.01)
                case "block":
                    if self._claim(f"{name}.reached"):
                        ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the lock: no other thread of this process runs
                case "mark":
                    self._claim(f"{name}.reached")
                case "raise":
                    raise ValueError(f"the user's own mistake at {at} {n}")
                case "flip":
                    if self._claim(f"{name}.flipped"):
                        self._flip_a_bit()
                case "disk":
                    if self._claim(f"{name}.failed"):
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                case "garble":
                    print(f"cannot read {NO_UTF_8}", file=sys.stderr)
                    raise ValueError(f"bad sample in {NO_UTF_8}")
                case "print":
                    print(f"hello from rank {rank} at {at} {n}")

    def _flip_a_bit(self):
        parameter = self.optimizer.param_groups[0]["params"][0]
        parameter.detach()._local_tensor.view(torch.uint8).view(-1)[2] ^= 1 << 6

    def _claim(self, name):
        """True for the first caller over all processes."""
        try:
            os.close(os.open(self.gate / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
