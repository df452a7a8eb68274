"""What came of a description: equal, refused in one sentence before the first step, or which fault.

Called by the command and the test.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kit.fuzz.draw import Description
from kit.fuzz.lives import Broken, Limits, Lives
from kit.fuzz.loops import LoopDescription, LoopLives
from kit.fuzz.reference import Reference, Seen
from kit.fuzz.spec import broken_rules, spec_of
from kit.processes.fleet import Fleet
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.exception_causes import LAYOUT_REFUSED

_FLOOR = 1e-5
_TIMES = 8.0
"""By how much a run may differ from the plain loop, in differences that rounding alone makes."""
_OF_A_STEP = 0.02
"""What an element that is rounded the other way changes in loss and norm, as a share of its half-precision step. The
noise of the plain loop's other runs does not always reach such an element."""
GOOD = ("equal", "refused")


@dataclass(frozen=True)
class Outcome:
    seed: int
    outcome: str
    """equal; refused; wrong; hang; died; traceback ...; invalid: the plain loop cannot train it either."""
    kind: str
    """Name of the mistake that was refused."""
    run: str
    detail: str
    features: tuple[str, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.outcome in GOOD

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome_of(fleet: Fleet, description: Description | LoopDescription, limits: Limits | None = None) -> Outcome:
    start = time.monotonic()

    def outcome(what: str, kind: str = "", run: str = "", detail: str = "") -> Outcome:
        spent = round(time.monotonic() - start, 2)
        return Outcome(description.seed, what, kind, run, detail, description.features, spent)

    if isinstance(description, LoopDescription):
        lives: Lives = LoopLives(fleet, description, limits or Limits())
    else:
        spec = spec_of(description)
        try:
            parse_spec(spec)
        except SpecError as error:
            return outcome("refused", "spec: " + _kind_of(str(error)), "submit", str(error))
        for layout in description.ways.layouts:
            if rules := broken_rules(description, layout):
                return outcome("refused", f"layout: {rules[0]}", "submit", ", ".join(rules))
        lives = Lives(fleet, description, spec, limits or Limits())
    try:
        plain = lives.plain()
        runs = (("1 worker", lives.alone), ("together", lives.together), ("eventful", lives.eventful))
        for name, run in runs:
            seen = run()
            if plain.error:
                return outcome("invalid", run=name, detail=f"the plain loop: {plain.error}")
            if not all(math.isfinite(loss) for loss in plain.seen.losses.values()):
                return outcome("invalid", run=name, detail="the plain loop: not finite")
            found = differences(plain, seen)
            if found:
                return outcome("wrong", run=lives._name, detail="; ".join(found[:8]))
        return outcome("equal")
    except Broken as broken:
        kind = broken.kind if broken.kind not in ("", "refused") else _kind_of(broken.message)
        if broken.kind == LAYOUT_REFUSED:
            kind = f"{kind}: {_kind_of(broken.message)}"
        return outcome(broken.what, kind if broken.what.endswith("refused") else "", broken.run, broken.message)
    finally:
        lives.close()


def differences(plain: Reference, seen: Seen) -> list[str]:
    """Where a run differs from the plain loop by more than rounding can explain."""
    found = []
    floor = _FLOOR + _OF_A_STEP * max(plain.seen.steps.values(), default=0.0)
    for name in ("losses", "norms", "metrics"):
        values, right = getattr(seen, name), getattr(plain.seen, name)
        for step in sorted(values):
            others = [getattr(other, name)[step] for other in plain.others]
            allowed = floor * (1 + abs(right[step])) + _TIMES * max((abs(o - right[step]) for o in others), default=0)
            if not abs(values[step] - right[step]) <= allowed:
                found.append(f"{name} of step {step}: {values[step]:.7g} for {right[step]:.7g}")
                break
    others = [abs(other.validation - plain.seen.validation) for other in plain.others]
    allowed = floor * (1 + abs(plain.seen.validation)) + _TIMES * max(others, default=0)
    if not abs(seen.validation - plain.seen.validation) <= allowed:
        found.append(f"validation: {seen.validation:.7g} for {plain.seen.validation:.7g}")
    for name in sorted({*plain.seen.tensors, *seen.tensors}):
        if name not in seen.tensors or name not in plain.seen.tensors:
            found.append(f"{name} is only in {'the plain loop' if name in plain.seen.tensors else 'the checkpoint'}")
            continue
        right, value = plain.seen.tensors[name], seen.tensors[name]
        if right.shape != value.shape:
            found.append(f"{name}: shape {value.shape} for {right.shape}")
            continue
        if not right.size:
            continue
        rounding = [float(np.abs(other.tensors[name] - right).max()) for other in plain.others]
        largest = float(np.abs(right).max())
        allowed = _FLOOR * (1 + largest) + _TIMES * max(rounding, default=0) + plain.seen.steps.get(name, 0.0) * largest
        far = float(np.abs(value - right).max())
        if not far <= allowed:
            found.append(f"{name}: off by {far:.3g}, allowed {allowed:.3g}")
    return found


def _kind_of(message: str) -> str:
    """A refusal without its names and numbers."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|[\w./]+\.py:\d+( in \w+\(\))?:?|\b[\w]+\.[\w.]+|\d+", "_", message)
    return " ".join(text.split()[:9])
