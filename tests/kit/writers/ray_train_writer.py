"""A script of Ray Train that leaves its mark: `ray_train_writer.py MARK GATES`."""

import sys

import mine
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    mine.leave(config["mark"], config["gates"])


config = {"mark": sys.argv[1], "gates": sys.argv[2]}
TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=1)).fit()
