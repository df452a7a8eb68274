"""Loops: from a seed to a description, and what came of it at one worker, at two, and through a life of events.

    seed -> LoopDescription     here: pure, the same seed is the same loop for ever
    description -> loop         tests/kit/loops/drawn.py, which the engine runs as it runs a user's program
    what is right               loop_reference.py: the same program with a `run` of plain torch, in one process
    what came out               `LoopLives`: the lives of drawn tasks, for a loop

Called by tools/fuzz_tasks.py (`make fuzz-loops`) and tests/dist/loop/test_drawn_loops.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kit.fuzz.draw import SAVED_AFTER, STEPS, Ways
from kit.fuzz.lives import Limits, Lives
from kit.fuzz.reference import Seen, array
from kit.processes.fleet import Fleet
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.worker_reports import StepReport

FILE = Path("tests/kit/loops/drawn.py")
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("plain", "convolution", "recurrent", "embedding", "frozen", "shared", "listed", "branches", "late"),
    "norm": ("none", "none", "layer", "batch", "cumulative"),
    "dropout": (0.0, 0.0, 0.2),
    "buffer": ("none", "none", "in_place", "data", "data_assigned", "replaced"),
    "buffer_size": (1, (64 << 8) + 1),
    "optimizer": ("sgd", "momentum", "adamw", "amsgrad", "rmsprop", "adagrad", "own"),
    "groups": ("one", "by_dim"),
    "updates": ("one", "one", "two_backward", "gan"),
    "data": ("batches", "global_batches", "loader", "epochs", "epochs_of_samples"),
    "num_micro_batches": (2, 3, 4),
    "micro_size": (2, 3),
    "schedule": ("none", "none", "step", "cosine", "one_cycle", "chained", "plateau", "lambda"),
    "clip": (None, 0.5, 0.05),
    "weight": ("len", "len", "none", "counts"),
    "average": ("none", "none", "own", "averaged_model"),
    "evaluation": ("none", "steps", "epochs"),
    "state": ("none", "attribute", "list", "closure", "data"),
    "noise": (False, False, False, True),
    "gradient": ("none", "none", "scaled", "scaled_data", "late", "late_data"),
    "by_epoch": (False, True),
    "num_epochs": (2, 3),
    "end": ("break", "agree"),
    "order": ("modules", "modules", "shuffled"),
    "late": ("none", "none", "none", "unfrozen", "evaluating", "dropout"),
}
"""The plain choice comes first."""
LATER = ("order", "late")
"""Drawn on their own, so that the other choices of a seed do not depend on them."""
MISPLACED = ("schedule", "state", "step", "head")
"""What is done in each micro-batch and belongs to the step; or is trained and not tracked."""
_PHASES = ("forward", "backward", "optimizer", "snapshot")


@dataclass(frozen=True)
class LoopDescription:
    """A loop. Every field is JSON."""

    seed: int
    choices: Mapping[str, Any]
    ways: Ways

    @property
    def features(self) -> tuple[str, ...]:
        """What is special about it, for tables of counts."""
        own = {name: value for name, value in self.choices.items() if name in CHOICES and value != CHOICES[name][0]}
        if self.choices["misplaced"] != "none":
            own["misplaced"] = self.choices["misplaced"]
        events = [name for name in ("killed", "changed") if getattr(self.ways, name) is not None]
        return (*(f"{name}={value}" for name, value in sorted(own.items())), *events)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def spec(self) -> dict[str, Any]:
        return {
            "task": None,
            "loop": {"file": str(FILE), "args": [json.dumps(self.choices)]},
            "elasticity": {"max_workers": 2},
            "checkpoint": {"every_steps": SAVED_AFTER},
            "snapshot": {"budget": 1.0},
        }

    @property
    def reference(self) -> tuple[str, dict[str, Any]]:
        """The function that computes what is right, and its argument."""
        return "kit.fuzz.loop_reference:reference", {**self.choices}


def draw_loop(seed: int) -> LoopDescription:
    source = random.Random(seed)
    drawn = {name: source.choice(choices) for name, choices in CHOICES.items() if name not in LATER}
    one, two = ({"dp_replicate": size, "dp_shard": 1, "shard": "full"} for size in (1, 2))
    resumed = source.choice((one, two, two))
    killed = (source.choice(_PHASES), source.choice((3, 4))) if resumed is two and source.random() < 0.7 else None
    survived = one if killed is not None else resumed
    changed = source.choice((None, None, one, two))
    ways = Ways(layout=two, resumed=resumed, killed=killed, survived=survived, changed=changed)
    drawn["lr"] = source.choice((0.1, 0.03)) if drawn["optimizer"] in ("sgd", "momentum", "own") else 0.02
    later = random.Random(f"later {seed}")
    drawn |= {name: later.choice(CHOICES[name]) for name in LATER}
    drawn, other = _fitting(source, drawn), random.Random(f"misplaced {seed}")
    return misplaced(LoopDescription(seed, drawn, ways), other.choice(MISPLACED) if other.random() < 0.1 else "none")


def misplaced(description: LoopDescription, what: str) -> LoopDescription:
    """The same loop with this mistake, and with what it is made of. `none`: as it is."""
    drawn = {**description.choices, "misplaced": what}
    if drawn["data"] == "global_batches":
        drawn["misplaced"] = "none"
    if drawn["misplaced"] == "schedule" and drawn["schedule"] in ("none", "plateau"):
        drawn["schedule"] = "step"
    if drawn["misplaced"] == "state":
        drawn["state"] = "data"
    return replace(description, choices=drawn)


def _fitting(source: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    """The same choices without those that mean nothing together, and with a number of samples."""
    is_by_epoch = drawn["data"].startswith("epochs") and drawn["updates"] != "gan"
    if not is_by_epoch:
        drawn |= {"by_epoch": False, "evaluation": drawn["evaluation"].replace("epochs", "none")}
    if drawn["updates"] == "gan":
        drawn |= {"data": "global_batches", "weight": "len", "state": "none", "gradient": "none", "end": "break"}
        drawn |= {"schedule": drawn["schedule"].replace("plateau", "none")}
    if drawn["data"] != "global_batches":
        drawn["gradient"] = "none"
    if drawn["buffer"] == "none":
        drawn["buffer_size"] = 1
    size = drawn["num_micro_batches"] * drawn["micro_size"]
    if not is_by_epoch:
        drawn["num_samples"] = source.choice((size, 3 * size, 5 * size + drawn["micro_size"]))
        return drawn
    steps = STEPS // drawn["num_epochs"]
    rest = source.randrange(1, size + 1)
    if drawn["norm"] in ("batch", "cumulative"):  # a norm needs two samples
        rest = drawn["micro_size"] * source.randrange(1, drawn["num_micro_batches"] + 1)
    drawn["end"] = "none"
    drawn["num_samples"] = size * (steps - 1) + rest
    if rest != size and drawn["weight"] == "none":
        drawn["weight"] = "len"  # micro-batches have different numbers of samples
    return drawn


def simpler_loops(description: LoopDescription) -> Iterable[LoopDescription]:
    """Each description that differs by one choice and is plainer."""
    for event in ("changed", "killed"):
        if getattr(description.ways, event) is not None:
            ways = replace(description.ways, **{event: None}, survived=description.ways.resumed)
            yield replace(description, ways=ways)
    if description.choices["misplaced"] != "none":
        yield misplaced(description, "none")
    for name, choices in CHOICES.items():
        if name not in ("data", "num_epochs", "end") and description.choices[name] != choices[0]:
            yield replace(description, choices={**description.choices, name: choices[0]})


class LoopLives(Lives):
    """All runs of one loop."""

    proven_steps = 2

    def __init__(self, fleet: Fleet, description: LoopDescription, limits: Limits) -> None:
        super().__init__(fleet, description, description.spec(), limits)
        self._metrics: dict[int, Mapping[str, float]] = {}
        """What was logged, by step. A run that is resumed logs no earlier steps: they are those of the runs before."""

    def _seen(self, steps: Mapping[int, StepReport], _: list[Any], directory: str) -> Seen:
        self._metrics |= {step: report.metrics for step, report in steps.items()}
        names = sorted({name for metrics in self._metrics.values() for name in metrics})
        logged = {
            f"log {name}": row({step: one[name] for step, one in self._metrics.items() if name in one})
            for name in names
        }
        tensors = {**_tensors_in(directory), **logged}
        return Seen(
            losses={step: report.loss or 0.0 for step, report in steps.items()},
            norms={step: report.grad_norm or 0.0 for step, report in steps.items()},
            metrics={},
            validation=0.0,
            tensors=tensors,
        )


def row(values: Mapping[int, float]) -> Any:
    """What was logged under a name, by step; 0 where nothing was."""
    return array(torch.tensor([values.get(step, 0.0) for step in range(1, STEPS + 1)]))


def _tensors_in(directory: str) -> dict[str, Any]:
    catalogue, _ = read_catalogue(directory)
    state = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in catalogue.items()}
    load(state, directory=directory)
    return {name: array(value) for name, value in state.items()}
