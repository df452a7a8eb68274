"""Follows the protocol of `node_test.pair_fault` as rank 1, except for one flipped bit. Argument: the store's port."""

import datetime
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

timeout = datetime.timedelta(seconds=30)
store = TCPStore("127.0.0.1", int(sys.argv[1]), world_size=2, is_master=False, timeout=timeout)
dist.init_process_group("gloo", store=PrefixStore("test", store), rank=1, world_size=2, timeout=timeout)
dist.recv(torch.empty(1 << 20, dtype=torch.int32), src=0)
wrong = (torch.arange(1 << 20, dtype=torch.int32) * 4) % 251
wrong[12345] ^= 1
dist.send(wrong, dst=0)
dist.barrier()
