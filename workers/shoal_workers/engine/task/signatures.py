"""The calls that Shoal makes into a task, checked against the task's signatures before the first of them is made.

A wrong call has no frame of the task on its stack, so its exception alone would not say whose fault it is. Called by
`load_task`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shoal_workers.engine.task.returned import place_of

REQUIRED = ("build_model", "build_dataset", "loss")
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "build_model": (),
    "build_dataset": ("split",),
    "loss": ("model", "batch"),
    "prepare": ("progress",),
    "build_optimizer": ("model", "settings"),
    "collate": ("samples",),
    "shard_units": ("model",),
    "export_config": ("model",),
}
"""What each method is called with, besides `self`; all are given by position."""


def refuse_constructor(task_class: type) -> None:
    """TypeError: the class cannot be constructed as Shoal does it."""
    error = _misfit(task_class, model={}, data={}, seed=0)
    if error is not None:
        constructor: Any = vars(task_class).get("__init__")
        where = f" ({place_of(constructor)})" if hasattr(constructor, "__code__") else ""
        name = task_class.__name__
        raise TypeError(
            f"{name}{where} cannot be constructed as {name}(model=..., data=..., seed=...): {error}. "
            "Write def __init__(self, model, data, seed)."
        )


def refuse_methods(task: object) -> None:
    """TypeError: a method of the task cannot be called as Shoal calls it. Members that it lacks are passed over."""
    for name, parameters in _PARAMETERS.items():
        method: Any = getattr(task, name, None)
        if method is None:
            continue
        call = f"{name}({', '.join(parameters)})"
        expected = f"def {name}({', '.join(('self', *parameters))})"
        if not callable(method):
            raise TypeError(f"{type(task).__name__}.{name} is {method!r}, and Shoal calls {call}. Write {expected}.")
        error = _misfit(method, *parameters)
        if error is not None:
            where = f"{place_of(method)} in {name}()" if hasattr(method, "__code__") else type(task).__name__
            raise TypeError(
                f"{where}: Shoal calls {call}, and the method does not accept that: {error}. Write {expected}."
            )


def needs_arguments(method: Callable[..., Any]) -> bool:
    """Whether it certainly cannot be called without arguments. What a wrapper wraps counts: torch wraps `step`."""
    try:
        inspect.signature(method).bind()
    except ValueError:
        return False
    except TypeError:
        return True
    return False


def _misfit(function: Callable[..., Any], *args: object, **kwargs: object) -> TypeError | None:
    """Why it cannot be called so; None also if nothing is known of it."""
    try:
        # what a decorator's wrapper takes, not what it wraps: it may add arguments
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        try:
            signature = inspect.signature(function)  # functools.cache and others that are written in C
        except (ValueError, TypeError):
            return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None
