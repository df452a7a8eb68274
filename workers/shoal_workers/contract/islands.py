"""Islands: jobs that train one model on parts of the data of their own, and merge what they have learned every H steps.

The method is DiLoCo (Douillard et al. 2023), merged without a stop as in Streaming DiLoCo (Douillard et al. 2025):

    island    | H steps | writes outer - own weights | trains on | reads all members' | outer step, own weights follow |
    service                        notes what arrives, closes the round: the members and their weights

Each island is a job of one sweep, with `islands.index` of its own. Nothing is shared but the storage: the jobs may run
in different clusters. Pure: the spec, what an island announces, and what the service answers. `engine/islands` trains,
`shoal_service/core/islands.py` decides.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal_workers.contract.base import Frozen, PositiveInt
from shoal_workers.contract.rules import Rule, Section
from shoal_workers.contract.worker_reports import SavedPart

FOLDER = "islands"
"""Directory of the rounds, in that of the job whose id is `IslandsSpec.run`."""
DECISION = "decision.json"
"""File of a closed round in its directory."""


class OuterSpec(Frozen):
    """The outer step: SGD on the outer weights, with the mean difference of the members as gradient."""

    lr: float = Field(0.7, gt=0, le=10, allow_inf_nan=False)
    """The rate; 1 without momentum is the mean of the members' weights."""
    momentum: float = Field(0.9, ge=0, lt=1, allow_inf_nan=False)
    """The share of the momentum of earlier rounds that stays."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""


class IslandsSpec(Section):
    """Several jobs that train one model together, each on every `num`-th batch, and merge their weights in rounds."""

    num: int = Field(ge=1, le=64)
    """Islands. They read the batches in turn, so each trains `stop.steps` steps of its own."""
    index: int | None = Field(None, ge=0, le=63)
    """The number of this job's island, from 0. `shoal submit` makes one job for each."""
    every_steps: PositiveInt = 50
    """Steps of an island from one round to the next."""
    lands_after_steps: PositiveInt = 1
    """An island trains on for so many steps after the end of a round before it takes the merged weights."""
    outer: OuterSpec = OuterSpec()
    quorum: int | None = Field(None, ge=1, le=64)
    """A round closes with so many islands once `grace_s` has passed; null: more than half of `num`."""
    grace_s: float = Field(20.0, ge=0, le=86_400, allow_inf_nan=False)
    """An island waits so long for a round that is not closed yet, and then trains on: the merge comes later."""
    compress: Literal["none", "bf16", "int8", "sparse"] = "none"
    """How differences are written. int8 has one scale for each tensor; sparse keeps the largest values, in 3 bytes
    each. What is left out is added to the next round (error feedback)."""
    density: float = Field(0.02, gt=0, le=1, allow_inf_nan=False)
    """Share of the values that sparse keeps."""
    topology: Literal["all", "pairs"] = "all"
    """pairs: a round is of two islands, which exchange weights, and each island has another partner in its next one;
    the last round is of all (as gossip, NoLoCo)."""
    fragments: int = Field(1, ge=1, le=64)
    """Each round merges one of so many parts of the model, in turn; `every_steps` is the time between two rounds of the
    same part. It must be divisible by the fragments."""
    clusters: tuple[str, ...] = Field((), max_length=64)
    """The cluster of each island, by index; empty: where `worker.cluster` says."""
    run: str | None = Field(None, max_length=64)
    """The id of the job of island 0. The service sets it."""

    rules = (
        Rule(
            lambda islands: islands.index is not None and islands.index >= islands.num,
            lambda islands: (
                f"islands.index {islands.index}: islands.num {islands.num} has the indices 0 to {islands.num - 1}."
            ),
        ),
        Rule(
            lambda islands: islands.quorum is not None and islands.quorum > islands.num,
            lambda islands: f"islands.quorum {islands.quorum} is more than islands.num {islands.num}.",
        ),
        Rule(
            lambda islands: islands.clusters and len(islands.clusters) != islands.num,
            lambda islands: (
                f"islands.clusters names {len(islands.clusters)} clusters for {islands.num} islands. Name each."
            ),
        ),
        Rule(
            lambda islands: islands.every_steps % islands.fragments,
            lambda islands: (
                f"islands.every_steps {islands.every_steps} is not a multiple of islands.fragments {islands.fragments}."
            ),
        ),
        Rule(
            lambda islands: islands.lands_after_steps >= islands.round_steps,
            lambda islands: (
                f"islands.lands_after_steps {islands.lands_after_steps} is not less than the "
                f"{islands.round_steps} steps of a round (islands.every_steps / islands.fragments): a round lands "
                "before the next one ends."
            ),
        ),
        Rule(
            lambda islands: islands.topology == "pairs" and (islands.compress != "none" or islands.fragments > 1),
            lambda islands: (
                f"islands.topology is pairs, islands.compress {islands.compress}, islands.fragments "
                f"{islands.fragments}. Pairs exchange whole weights, and what compression leaves out of weights is not "
                "made good later. Set islands.compress to none and islands.fragments to 1, or islands.topology to all."
            ),
        ),
    )

    @property
    def round_steps(self) -> int:
        """Steps from one round to the next."""
        return self.every_steps // self.fragments

    @property
    def least_members(self) -> int:
        """Islands without which no round of all closes."""
        return self.quorum if self.quorum is not None else self.num // 2 + 1

    @property
    def num_at_once(self) -> int:
        """Rounds in which all islands have had one: that of all, or one for each pair."""
        return (self.num + 1) // 2 if self.topology == "pairs" else 1

    def first_of_all(self, num_steps: int) -> int:
        """Return the first round of all islands: with pairs the one with which islands that are never late end."""
        num_rounds = max(0, num_steps - 2 * self.lands_after_steps) // self.round_steps
        return 0 if self.topology == "all" else num_rounds * self.num_at_once

    def find_islands(self, number: int, num_steps: int) -> tuple[int, ...]:
        """Return the islands that merge in a round. Each pair has a number of its own; after every island has had every
        other one as its partner, they begin again. An odd one out is alone.

        Args:
            num_steps: of an island's job.
        """
        if number >= self.first_of_all(num_steps):
            return tuple(range(self.num))
        turn, pair = divmod(number, self.num_at_once)
        places = 2 * self.num_at_once - 1  # on a circle, and the last island in its middle
        partners = {(turn + pair) % places, (turn - pair) % places if pair else places}
        return tuple(sorted(island for island in partners if island < self.num))

    def next_round(self, number: int, num_steps: int) -> int:
        """Return the first round from `number` on that is one of this island."""
        while self.index not in self.find_islands(number, num_steps):
            number += 1
        return number


class Announcement(Frozen):
    """One rank's part of an island's difference is durable: a file beside it, which the service reads."""

    round: int
    """From 0."""
    island: int
    islands: tuple[int, ...]
    """All that merge in this round."""
    from_step: int
    """Steps of the island whose samples were counted in earlier rounds."""
    tokens: PositiveInt
    """Trained since then."""
    loss: float | None
    """Mean training loss of its steps since then; null if all were skipped."""
    waited_s: float
    """Seconds that the island has waited for rounds since its generation began."""
    part: SavedPart


class Member(Frozen):
    """An island whose difference is part of a round."""

    island: int
    weight: float
    """Its share of the members' tokens."""
    step: int
    """Steps of the island when it was written."""
    directory: str
    """Where it is, in the directory of the round."""


class RoundDecision(Frozen):
    """A closed round; every island makes the same outer step from it."""

    round: int
    members: tuple[Member, ...]
    """By island: sums are made in this order."""
    absent: tuple[int, ...] = ()
    """The islands of the round that are no members."""


def round_folder(number: int) -> str:
    return f"round-{number:06d}"


def announcement_file(rank: int) -> str:
    return f"announced-{rank}.json"
