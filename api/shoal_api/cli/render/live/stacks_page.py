"""The page of `shoal stacks`, also a part of the page of an incident. Pure, as `tables`."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shoal_api.cli.render.tables import clock
from shoal_workers.contract.messages import StackCluster, Stacks

_MAX_FRAMES = 30


def stacks_page(stacks: Stacks) -> list[Any]:
    """One line that says where the ranks are, then each cluster with its frames, innermost first."""
    page: list[Any] = [Text(stacks.summary or "no worker is warm", style="bold")]
    page.append(Text(f"{clock(stacks.at)}, generation {stacks.generation}, {stacks.reason}", style="dim"))
    for one in stacks.clusters:
        page.extend((Text(""), _head(one)))
        page.extend(Text(f"  {f.file}:{f.line}  {f.function}") for f in one.frames[:_MAX_FRAMES])
        if len(one.frames) > _MAX_FRAMES:
            page.append(Text(f"  ... {len(one.frames) - _MAX_FRAMES} more frames, see --json", style="dim"))
    return page


def _head(one: StackCluster) -> Text:
    ranks = ", ".join(str(rank) for rank in one.ranks)
    who = f"rank {ranks}" if one.ranks else ", ".join(one.worker_ids)
    return Text.assemble((who, "bold cyan"), f"  {one.words}", (f"  ({one.source})", "dim"))
