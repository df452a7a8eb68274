"""A world for the attempt machine; see worlds/attempt/world.py in tests/kit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.worlds.attempt.new_world import make_world
from kit.worlds.attempt.world import World


@pytest.fixture
def new_world() -> Callable[..., World]:
    """new_world(workers=3, min_workers=1, standby=0, memory=False, nodes=None, **spec): an attempt that has just been
    opened; with `memory`, its workers keep snapshots."""
    return make_world
