"""A loop that leaves traces: `traces.py HOW DIRECTORY`.

anyone, guarded    every process writes a file; the one that run.is_rank_zero names
posts              every process posts to the port in the file `port`
connects, datagrams, asyncio    every process sends to it in another way
reads ahead        with a process that reads
waits              the same, and trials do not end
large              more parameters than are tried
other              a trial ends its process
"""

import asyncio
import os
import socket
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import shoal

HOW, DIRECTORY = sys.argv[1], Path(sys.argv[2])
WORKER = os.getpid()


class Points:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index * 0.3, index % 5]).sin()


def connect(port, words):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(words)


def send_datagram(port, words):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(words, ("127.0.0.1", port))


def connect_by_asyncio(port, words):
    async def send():
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    asyncio.run(send())


SENDING = {"connects": connect, "datagrams": send_datagram, "asyncio": connect_by_asyncio}


def train(run):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    if HOW == "large":
        model.table = nn.Parameter(torch.zeros(50_000_001, dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    workers = 1 if HOW in ("reads ahead", "waits") else 0
    for x in run.batches(Points(), global_size=8, micro_size=2, num_workers=workers):
        if run.step == 4:
            return
        if HOW == "anyone" or (HOW == "guarded" and run.is_rank_zero):
            (DIRECTORY / str(os.getpid())).write_text(str(run.step))
        if HOW == "posts":
            with suppress(OSError):  # as who sends a message that may be lost
                urllib.request.urlopen(f"http://127.0.0.1:{(DIRECTORY / 'port').read_text()}", str(run.step).encode())
        if HOW in SENDING:
            with suppress(OSError):
                SENDING[HOW](int((DIRECTORY / "port").read_text()), f"{run.step};".encode())
        if HOW == "waits" and os.getpid() != WORKER:
            time.sleep(600)
        if HOW == "other" and os.getpid() != WORKER:
            os._exit(3)
        run.backward((model(x) - 1).square().mean(), weight=len(x))
        run.steps(optimizer)


if __name__ == "__main__":
    shoal.run(train)
