"""Alternating updates of several optimizers, as of a GAN or of an actor and a critic: which one a step updates, and
with which batch.

    updates        critic   critic   actor  | critic   critic   actor  | ...      one round after the other
    step           0        1        2        3        4        5
    batch          0        1        1        2        3        3

Each update is a step of its own: it has its gradient over the whole global batch, its vote and its place in snapshots.
So a death, a resize and a value that is not finite cost what they cost every task, and the second update of a round
sees the weights of the first one at every world size. A batch serves updates of different optimizers; one that has been
updated with a batch gets the next one.

Pure functions of the step. Hidden here: how a task declares its optimizers, and what it may return from
`training_step`. Made by `load_task`; called by the passes, `Batches` and the trainer.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from shoal_workers.contract.worker_reports import is_metric_name

METRIC = "loss_{}"
"""The metric that has the loss of an optimizer's updates."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What a task gets of one of its optimizers. A function of the step alone."""

    is_updated: bool
    """True if this step updates its parameters: only its loss is computed."""
    num_updates: int
    """Completed updates."""


@dataclass(frozen=True, slots=True)
class Place:
    """One update of a round."""

    name: str
    batch: int
    """Which of the round's batches."""


class Alternation:
    """The updates of one task. Immutable.

    Args:
        patterns: of parameters' names, by optimizer; `*` stands for any characters.
        updates: names in the order of a round.
    """

    def __init__(self, patterns: Mapping[str, Sequence[str]], updates: Sequence[str]) -> None:
        self._patterns = dict(patterns)
        self._per_round = Counter(updates)
        places: list[Place] = []
        batch, served = 0, set[str]()
        for name in updates:
            if name in served:
                batch, served = batch + 1, set()
            served.add(name)
            places.append(Place(name, batch))
        self._round = tuple(places)
        self._num_batches = batch + 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._patterns)

    def name(self, step: int) -> str:
        """The optimizer that the update from `step` completed steps to `step` + 1 belongs to."""
        return self._round[step % len(self._round)].name

    def batch(self, step: int) -> int:
        """The number of the global batch that this update reads; batches count from 0 over the whole run."""
        number, place = divmod(step, len(self._round))
        return number * self._num_batches + self._round[place].batch

    def num_steps(self, num_batches: int) -> int:
        """Steps until `num_batches` batches have served all of their updates."""
        rounds, rest = divmod(num_batches, self._num_batches)
        return rounds * len(self._round) + sum(turn.batch < rest for turn in self._round)

    def is_first(self, step: int) -> bool:
        """Return whether this is the first update of its optimizer."""
        return step < len(self._round) and all(turn.name != self.name(step) for turn in self._round[:step])

    def optimizers(self, step: int) -> Mapping[str, OptimizerState]:
        """What `training_step` gets as its third argument."""
        number, place = divmod(step, len(self._round))
        done = Counter(turn.name for turn in self._round[:place])
        return MappingProxyType(
            {
                name: OptimizerState(name == self._round[place].name, number * self._per_round[name] + done[name])
                for name in self._patterns
            }
        )

    def members(self, parameters: Iterable[str]) -> dict[str, frozenset[str]]:
        """The parameters of each optimizer. `parameters`: the names of all that need a gradient.

        Raises:
            ValueError: one has none, or a parameter belongs to none, or to two.
        """
        names = tuple(parameters)
        owners = {
            member: [
                name for name, own in self._patterns.items() if any(fnmatchcase(member, pattern) for pattern in own)
            ]
            for member in names
        }
        members_by_name = {
            name: frozenset(member for member in names if name in owners[member]) for name in self._patterns
        }
        for name, own in members_by_name.items():
            if not own:
                patterns = " and ".join(map(repr, self._patterns[name]))
                near = difflib.get_close_matches(self._patterns[name][0].replace("*", ""), names, n=3, cutoff=0.3)
                raise ValueError(
                    f"optimizers[{name!r}] is {patterns}, which matches no parameter that needs a gradient. The "
                    f"nearest names are {', '.join(map(repr, near or names[:3]))}; `*` stands for any characters."
                )
        for one, own_names in owners.items():
            if len(own_names) > 1:
                raise ValueError(
                    f"the parameter {one!r} belongs to the optimizers {' and '.join(own_names)}, and each of them "
                    "would update it with a loss of its own. Make the patterns in optimizers narrower."
                )
            if not own_names:
                raise ValueError(
                    f"the parameter {one!r} belongs to none of the optimizers {', '.join(self._patterns)}, so it would "
                    "never be updated. Add its name to a pattern in optimizers, or set requires_grad_(False)."
                )
        return members_by_name

    def loss_of(self, returned: Any, step: int, where: str) -> Any:
        """What `training_step` has returned for the optimizer of this step; a function is called. `where`: its place.

        Raises:
            TypeError: it has returned something else.
        """
        name = self.name(step)
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"{where}: training_step() must return a dict with a loss for each optimizer, "
                f'{{"{name}": lambda: loss, ...}}; it returned {type(returned).__name__}.'
            )
        if name not in returned:
            has = ", ".join(map(repr, returned)) or "nothing"
            raise TypeError(
                f"{where}: training_step() returned no loss for the optimizer {name!r}, which this step updates. It "
                f"returned {has}; optimizers are {', '.join(map(repr, self._patterns))}."
            )
        value = returned[name]
        return value() if callable(value) else value


def alternation_of(task: object) -> Alternation | None:
    """The alternation that a task declares; None if it has no `training_step`.

    Raises:
        TypeError: it is declared in another form.
    """
    if getattr(task, "training_step", None) is None:
        return None
    kind = type(task).__name__
    if getattr(task, "batch_loss", None) is not None:
        raise TypeError(
            f"{kind} has training_step() and batch_loss(), and a step has one loss. Leave one of them out; see "
            "docs/tasks.md."
        )
    declared: Any = getattr(task, "optimizers", None)
    if not isinstance(declared, Mapping) or not declared:
        raise TypeError(
            f"{kind} has training_step(), and its optimizers are {declared!r}. Name them with the parameters that each "
            'updates: optimizers = {"d": "discriminator.*", "g": "generator.*"}.'
        )
    patterns = {name: _patterns(name, value, kind) for name, value in declared.items()}
    updates: Any = getattr(task, "updates", None)
    order = tuple(patterns) if updates is None else _updates(updates, patterns, kind)
    return Alternation(patterns, order)


def _patterns(name: Any, value: Any, kind: str) -> tuple[str, ...]:
    if not is_metric_name(name) or not is_metric_name(METRIC.format(name)):
        raise TypeError(
            f"{kind}.optimizers has the name {name!r}, and the loss of its updates is the metric loss_NAME. Use a "
            "short name of letters, digits and _ that begins with a letter."
        )
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{kind}.optimizers[{name!r}] is {value!r}. Give it a pattern of parameters' names, or a list of them, "
            'such as "discriminator.*".'
        )
    return patterns


def _updates(value: Any, patterns: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    updates = tuple(value) if isinstance(value, list | tuple) else ()
    if not updates or set(updates) != set(patterns):
        raise TypeError(
            f"{kind}.updates is {value!r}. It is the order of a round, a list in which each name of optimizers "
            f"({', '.join(map(repr, patterns))}) stands at least once."
        )
    return updates
