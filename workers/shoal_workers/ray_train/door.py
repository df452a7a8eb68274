"""Where a script with `launcher: ray_train` begins, in the process of each rank: `run`, called by script/program.py.

The guardian imports this module, and with it Ray Train, before it forks the script. Ray Train's names are changed only
in the process of rank 0's script.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray.data
import ray.train.torch

from shoal_workers.ray_train.fit import Driver, follow
from shoal_workers.ray_train.group import Group

_IMPORTED = ray.data
"""Imported for scripts that use it."""


def run(script: Callable[[], None]) -> None:
    """Return when the script of rank 0 has ended well; what it raises is raised. `script` runs it as `__main__`."""
    group = Group(os.environ)
    if group.rank:
        follow(group)
        return
    if os.environ.get("RAY_TRAIN_V2_ENABLED") == "0":
        raise RuntimeError("RAY_TRAIN_V2_ENABLED is 0, and Shoal answers for Ray Train V2. Leave the variable out.")
    driver = Driver(group, os.environ["SHOAL_CHECKPOINT_DIR"])
    _take_over(driver)
    try:
        script()
    except SystemExit as end:
        if end.code in (None, 0):
            driver.end()
        raise
    driver.end()


def _take_over(driver: Driver) -> None:
    trainer: Any = ray.train.torch.TorchTrainer
    base: Any = next(parent for parent in trainer.__mro__[1:] if "fit" in vars(parent))

    def fit(self: Any) -> ray.train.Result:
        return driver.fit(self)

    def refuse(self: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} of Ray Train starts workers of its own, and Shoal answers for "
            "ray.train.torch.TorchTrainer alone. Train with PyTorch, or submit the script with ray job submit."
        )

    trainer.fit, base.fit = fit, refuse
