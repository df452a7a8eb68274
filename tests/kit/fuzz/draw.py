"""From a seed to the description of a task and of the ways in which it is trained. Pure: no torch, no clock.

A description is plain data, so that it can be printed, sent to a worker as a spec's `model` section, and made smaller.
Every choice has a plain value, which comes first in its list: shrinking sets choices to it, one by one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any

from kit.fuzz.kinds import ALL_PIECES, LOSSES, OPTIMIZERS, PIECES, SPELLINGS
from kit.fuzz.plans import CHOICES, Decoder, draw_decoder, layouts, world_of


@dataclass(frozen=True)
class Piece:
    """One module of the model, from (B, T, W) to (B, T, W)."""

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Optim:
    """Which optimizer, and how its parameters are grouped."""

    kind: str = "builtin"
    options: Mapping[str, Any] | None = None
    groups: str = "one"


@dataclass(frozen=True)
class Ways:
    """Layouts of the data axes in which the task is trained, and what happens to it in its last life."""

    layout: Mapping[str, Any]
    """The layout of the undisturbed run."""
    resumed: Mapping[str, Any]
    """The layout of the run that begins at the undisturbed run's checkpoint."""
    killed: tuple[str, int] | None
    """Phase in which the last rank of `resumed` dies, and the number of completed steps."""
    survived: Mapping[str, Any]
    """The layout of the group without it; the same workers' if none dies."""
    changed: Mapping[str, Any] | None
    """The layout after a change that was asked for; None: it is not changed."""

    @property
    def layouts(self) -> list[Mapping[str, Any]]:
        return [self.layout, self.resumed, self.survived, *([self.changed] if self.changed is not None else [])]


@dataclass(frozen=True)
class Description:
    """A task. Every field is JSON."""

    seed: int
    pieces: tuple[Piece, ...]
    ways: Ways
    decoder: Decoder | None = None
    """A decoder with a plan, in place of pieces."""
    width: int = 4
    length: int = 2
    """Tokens of a sample."""
    container: str = "list"
    """How the model holds its pieces."""
    is_reversed: bool = False
    """Pieces are registered in another order than they run in."""
    inlet: str = "linear"
    head: str = "linear"
    loss: str = "squares"
    has_metrics: bool = False
    optim: Optim = Optim()
    lr: float = 0.01
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    num_micro_batches: int = 4
    micro_size: int = 2
    num_samples: int = 64
    deterministic: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def reference(self) -> tuple[str, dict[str, Any]]:
        """The function that computes what is right, and its argument."""
        return "kit.fuzz.reference:reference", self.to_json()

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Description:
        ways, decoder = data["ways"], data["decoder"]
        killed = ways["killed"]
        return Description(
            **{
                **data,
                "pieces": tuple(Piece(**piece) for piece in data["pieces"]),
                "ways": Ways(**{**ways, "killed": None if killed is None else (str(killed[0]), int(killed[1]))}),
                "optim": Optim(**data["optim"]),
                "decoder": None if decoder is None else Decoder(**decoder),
            }
        )

    @property
    def features(self) -> tuple[str, ...]:
        """What is special about it, for tables of counts."""
        found = [piece.kind for piece in self.pieces]
        if self.decoder is not None:
            found = ["decoder", *(f"{name}={value}" for name, value in _special(self.decoder))]
            found += [f"layout={words}" for words in sorted(set(map(_words, self.ways.layouts)))]
        plain = Description(seed=0, pieces=(), ways=self.ways)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in (
                "seed",
                "pieces",
                "ways",
                "decoder",
                "optim",
                "width",
                "length",
                "lr",
            ) and value != getattr(plain, field.name):
                found.append(f"{field.name}={value}" if not isinstance(value, bool) else field.name)
        return (*sorted(set(found)), f"optim={self.optim.kind}")


SEED = 3
"""The seed of every spec: what differs is drawn into the description."""
STEPS = 6
SAVED_AFTER = 2
_PHASES = ("forward", "backward", "optimizer", "snapshot")


def draw(
    seed: int,
    kinds: Iterable[str] = PIECES,
    optimizers: Iterable[str] = OPTIMIZERS,
    plans: float = 0.3,
    *,
    spelled: float = 0.0,
    spellings: Iterable[str] = SPELLINGS,
) -> Description:
    """The task of a seed, of these kinds of pieces and optimizers; the fraction `plans` of all are decoders.

    `spelled`: the fraction of the tasks of pieces that also have sizes and spellings drawn, of these kinds. The other
    choices of a seed do not depend on it."""
    source = random.Random(seed)
    has_plan = source.random() < plans
    num_micro_batches = source.choice((2, 3, 4, 5, 8) if has_plan else (1, 2, 3, 4, 5, 7))
    pieces = tuple(_piece(source, source.choice(sorted(kinds))) for _ in range(source.choice((1, 2, 2, 3, 3, 4))))
    optimizer = source.choice(("builtin", *sorted(optimizers)))
    drawn = Description(
        seed=seed,
        pieces=() if has_plan else pieces,
        ways=_UNDRAWN,
        decoder=draw_decoder(source) if has_plan else None,
        width=source.choice((4, 5, 6, 7, 11)),
        length=source.choice((1, 2, 3, 5)),
        container=source.choice(("list", "list", "attributes", "dict", "nested")),
        is_reversed=source.random() < 0.2,
        inlet=source.choice(("linear", "linear", "embedding")),
        head=source.choice(("linear", "linear", "tied")),
        loss=source.choice(("squares", "squares", "labels")),
        has_metrics=source.random() < 0.3,
        optim=Optim(
            optimizer,
            {name: source.choice(choices) for name, choices in OPTIMIZERS.get(optimizer, {}).items()},
            source.choice(("one", "one", "two", "by_dim")),
        ),
        lr=source.choice((0.01, 0.003)),
        clip_norm=source.choice((None, 1.0, 0.05)),
        schedule=source.choice(("constant", "linear", "cosine")),
        warmup_steps=source.choice((0, 0, 2)),
        num_micro_batches=num_micro_batches,
        micro_size=source.choice((1, 2, 3)),
        num_samples=source.choice((11, 64)),
        deterministic=source.random() < (0.05 if has_plan else 0.2),
    )
    if has_plan:  # of these a decoder has nothing
        plain = {"container": "list", "is_reversed": False, "inlet": "linear", "head": "linear", "loss": "squares"}
        drawn = replace(drawn, width=4, length=2, **plain)
    drawn = replace(drawn, ways=_ways(source, drawn))
    spelling = random.Random(f"spelling {seed}")
    return _spelled(spelling, drawn, sorted(spellings)) if not has_plan and spelling.random() < spelled else drawn


def _spelled(source: random.Random, drawn: Description, kinds: list[str]) -> Description:
    """With a piece that has a spelling, in the place of the last one; and sometimes a size, a group or a loss."""
    size = max(2, drawn.num_micro_batches) * drawn.micro_size
    return replace(
        drawn,
        pieces=(*drawn.pieces[:-1], _piece(source, source.choice(kinds))),
        num_samples=source.choice((drawn.num_samples, max(1, size - 1), size, size + 1)),
        loss=source.choice(LOSSES) if source.random() < 0.1 else drawn.loss,
        optim=source.choice((drawn.optim, drawn.optim, replace(drawn.optim, groups="by_attribute"), READING)),
        num_micro_batches=max(2, drawn.num_micro_batches),  # state is noticed when it is read
    )


READING = Optim("own_scaled", {"declared": None})
"""An optimizer that reads attributes of parameters."""


def _piece(source: random.Random, kind: str) -> Piece:
    return Piece(kind, {name: source.choice(choices) for name, choices in ALL_PIECES[kind].items()})


def _ways(source: random.Random, drawn: Description) -> Ways:
    most = min(4, drawn.num_micro_batches)
    layout = _layout(source, drawn, range(min(2, most), most + 1))
    resumed = _layout(source, drawn, range(1, most + 1))
    world = world_of(resumed)
    killed = (source.choice(_PHASES), source.choice((3, 4))) if world > 1 and source.random() < 0.8 else None
    survived = _layout(source, drawn, range(1, world)) if killed else resumed
    changed = _layout(source, drawn, range(1, most + 1)) if source.random() < 0.6 else None
    return Ways(layout=layout, resumed=resumed, killed=killed, survived=survived, changed=changed)


def _layout(source: random.Random, drawn: Description, worlds: range) -> dict[str, Any]:
    """A legal one for a group of one of these sizes; with a plan, on any axis."""
    from kit.fuzz.spec import broken_rules

    if drawn.decoder is not None and worlds[-1] > 1:
        for candidate in islice(layouts(source, drawn.decoder), 30):
            if world_of(candidate) in worlds and not broken_rules(drawn, candidate):
                return candidate
    while True:
        candidate = _on_data_axes(source, source.choice(worlds))
        if not broken_rules(drawn, candidate):
            return candidate


def _on_data_axes(source: random.Random, world: int) -> dict[str, Any]:
    replicate = source.choice([n for n in (1, 1, 2, world) if world % n == 0])
    level = source.choice(("full", "full", "gradients", "optimizer"))
    return {"dp_replicate": replicate, "dp_shard": world // replicate, "shard": level}


_UNDRAWN = Ways(layout={}, resumed={}, killed=None, survived={}, changed=None)


def _special(decoder: Decoder) -> Iterable[tuple[str, Any]]:
    """The choices that are not plain."""
    plain = Decoder()
    for field in fields(decoder):
        value = getattr(decoder, field.name)
        if value != getattr(plain, field.name) and field.name not in ("head_width", "hidden", "vocabulary", "blocks"):
            yield field.name, value


def _words(layout: Mapping[str, Any]) -> str:
    return "x".join(f"{axis}{degree}" for axis, degree in layout.items() if isinstance(degree, int) and degree > 1)


def simpler(description: Description) -> Iterable[Description]:
    """Each description that differs by one choice and is plainer, those with the largest differences first."""
    pieces = description.pieces
    if len(pieces) > 1:
        for index in range(len(pieces)):
            yield replace(description, pieces=pieces[:index] + pieces[index + 1 :])
    ways = description.ways
    two = {"dp_replicate": 1, "dp_shard": 2, "shard": "full"}
    if ways.changed is not None:
        yield replace(description, ways=replace(ways, changed=None))
    if ways.killed is not None:
        yield replace(description, ways=replace(ways, killed=None, survived=ways.resumed))
    if description.decoder is not None:
        yield from _plainer_decoders(description, description.decoder)
    if description.decoder is None and ways.layout != two and description.num_micro_batches > 1:
        yield replace(description, ways=replace(ways, layout=two))
    plain = Description(seed=description.seed, pieces=pieces, ways=ways)
    for field in fields(description):
        if field.name not in ("seed", "pieces", "ways", "decoder") and getattr(description, field.name) != getattr(
            plain, field.name
        ):
            candidate = replace(description, **{field.name: getattr(plain, field.name)})
            if candidate.num_micro_batches >= description.num_micro_batches:
                yield candidate
    for index, piece in enumerate(pieces):
        for name, choices in ALL_PIECES[piece.kind].items():
            if piece.options[name] != choices[0]:
                plainer = Piece(piece.kind, {**piece.options, name: choices[0]})
                yield replace(description, pieces=(*pieces[:index], plainer, *pieces[index + 1 :]))
        if piece.kind != "linear" and len(pieces) > 1:
            plainer = Piece("linear", {name: choices[0] for name, choices in PIECES["linear"].items()})
            yield replace(description, pieces=(*pieces[:index], plainer, *pieces[index + 1 :]))
    for name, choices in OPTIMIZERS.get(description.optim.kind, {}).items():
        options = description.optim.options or {}
        if options.get(name) != choices[0]:
            yield replace(description, optim=replace(description.optim, options={**options, name: choices[0]}))


def _plainer_decoders(description: Description, decoder: Decoder) -> Iterable[Description]:
    ways, one = description.ways, {"dp_replicate": 1, "dp_shard": 1, "shard": "full"}
    for name in ("layout", "resumed", "survived", "changed"):
        layout = getattr(ways, name)
        if layout is not None:
            for key, plain in (("recompute", "none"), ("shard", "full"), ("context", "all_gather")):
                if layout.get(key, plain) != plain:
                    yield replace(description, ways=replace(ways, **{name: {**layout, key: plain}}))
    if ways.killed is None and ways.resumed != one:
        yield replace(description, ways=replace(ways, resumed=one, survived=one))
    plain = Decoder()
    for name in CHOICES:
        if getattr(decoder, name) != getattr(plain, name) and name not in ("blocks", "head_width"):
            yield replace(description, decoder=replace(decoder, **{name: getattr(plain, name)}))
    if decoder.experts and not any(layout.get("ep", 1) > 1 for layout in ways.layouts):
        yield replace(description, decoder=replace(decoder, experts=0, are_experts_split=False))
    if decoder.kv_heads != decoder.heads:
        yield replace(description, decoder=replace(decoder, kv_heads=decoder.heads))
