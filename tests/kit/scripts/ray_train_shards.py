"""Every way of reading a shard of Ray Data, on two ranks. Each rank prints what it has read as JSON."""

import json
from typing import Any

import ray.data
import ray.train
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_loop_per_worker() -> None:
    rank = ray.train.get_context().get_world_rank()
    train = ray.train.get_dataset_shard("train")
    found: dict[str, Any] = {"rank": rank}
    found["rows"] = [row["id"] for row in train.iter_rows()]
    found["broken off"] = next(iter(train.iter_batches(batch_size=3)))["id"].tolist()
    found["batches"] = [batch["id"].tolist() for batch in train.iter_batches(batch_size=3, drop_last=True)]
    found["blocks"] = [int(row) for batch in train.iter_batches(batch_size=None) for row in batch["id"]]
    shuffled = train.iter_torch_batches(batch_size=3, local_shuffle_buffer_size=4, local_shuffle_seed=1)
    found["shuffled"] = sorted(row for batch in shuffled for row in batch["id"].tolist())
    found["names"] = train.schema().names
    found["materialized"] = sorted(row["id"] for row in train.materialize().take_all())
    whole = ray.train.get_dataset_shard("whole")
    if rank == 1:  # one rank alone
        found["whole"] = [row["id"] for row in whole.iter_rows()]
    print(json.dumps(found))
    ray.train.report({"loss": 1.0})


if __name__ == "__main__":
    TorchTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=2),
        datasets={
            "train": ray.data.from_items([{"id": row} for row in range(17)], override_num_blocks=3),
            "whole": lambda: ray.data.from_items([{"id": row} for row in range(5)]),
        },
        dataset_config=DataConfig(datasets_to_split=["train"]),
    ).fit()
