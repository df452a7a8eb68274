"""A star in a plan's name stands for exactly one part of a dotted name."""

from __future__ import annotations

import pytest
from torch import nn

from shoal_workers.engine.parallel.names import matching


def model() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"attention": nn.ModuleDict({"core": nn.Identity()}), "core": nn.Identity()})

    return nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(2)), "core": nn.Identity()})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*.attention.core", ["blocks.0.attention.core", "blocks.1.attention.core"]),
        ("blocks.*.core", ["blocks.0.core", "blocks.1.core"]),
        ("blocks.1.*", ["blocks.1.attention", "blocks.1.core"]),
        ("core", ["core"]),
        ("blocks.*.c*", []),
        ("", [""]),
    ],
)
def test_names_match_part_by_part(pattern: str, expected: list[str]) -> None:
    tree = model()
    found = matching(tree, pattern)
    assert [name for name, _ in found] == expected
    assert all(tree.get_submodule(name) is module for name, module in found)
