"""Paths under which earlier releases pickled classes of the contract, kept readable without their modules.

Ray pickles a class by the path of its module. A supervisor that Ray restarts after an upgrade unpickles the
configuration that the release before wrote, and reads descriptions of that release's workers. `shoal_workers.contract`
calls `register` when it is imported, the only moment that is before every such pickle. It imports none of the modules.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_CONTRACT = "shoal_workers.contract"
MOVED = {
    "code.spec": "user_code",
    "course.best": "validation",
    "course.continuing": "spec",
    "course.settings": "training_settings",
    "course.sweep": "spec",
    "course.training": "spec",
    "errors.classes": "exception_causes",
    "errors.suspects": "suspects",
    "metrics.messages": "messages",
    "metrics.spec": "spec",
    "model.plan": "model",
    "model.shape": "model",
    "profiling.messages": "profiles",
    "webhooks.spec": "webhooks",
    "worker_use": "messages",
}
"""A module that a release had -> the module that has its classes now; both below `shoal_workers.contract`."""


def register() -> None:
    """Makes the old paths known to pickle. Nothing in this repository may import them."""
    for old, new in MOVED.items():
        folder = old.split(".")[0]
        if old != folder and folder not in MOVED.values():  # Python imports a package before what is in it
            sys.modules.setdefault(f"{_CONTRACT}.{folder}", _Moved(f"{_CONTRACT}.{folder}", f"{_CONTRACT}.{new}"))
        sys.modules.setdefault(f"{_CONTRACT}.{old}", _Moved(f"{_CONTRACT}.{old}", f"{_CONTRACT}.{new}"))


class _Moved(ModuleType):
    """A module under its old path. It imports the new module only when a class is looked up in it."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what tools ask every module for, such as __file__
            raise AttributeError(name)
        return getattr(import_module(self._target), name)
