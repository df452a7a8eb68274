"""Projects: how many workers each may have, each gets back, and each is entitled to.

    limit        never more, over the whole subtree of a project
    guaranteed   entitled to at least this many as soon as its jobs can use them
    the rest     hierarchical max-min: projects share by weight what others of their parent do not use (borrowing)

Called by `decide`. It counts workers, and knows neither jobs nor nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_service.core.scheduling.market import DEFAULT_PROJECT, Project


class Share:
    """One project during one decision."""

    def __init__(self, project: Project, parent: Share | None, changes: list[int]) -> None:
        """`changes`: one number for all projects, which grows whenever one of them has other workers."""
        self.project = project
        self._changes = changes
        self._order: tuple[bool, tuple[float, ...]] = (True, ())
        self._ordered_at = -1
        """`_order` is as of this number."""
        self.path: tuple[Share, ...] = (self, *(parent.path if parent else ()))
        """This project and its ancestors."""
        self.has_limits = any(
            share.project.limit is not None or share.project.max_running is not None for share in self.path
        )
        self._limited = [share for share in self.path if share.project.limit is not None]
        self._levels = tuple((share, share.project.weight) for share in reversed(self.path))
        self._guaranteed = tuple((share, share.project.guaranteed) for share in self.path if share.project.guaranteed)
        self._capped = [share for share in self.path if share.project.max_running is not None]
        self.children: list[Share] = []
        self.used = 0
        self.running = 0
        self.demand = 0
        """Workers that the jobs of the subtree can use."""
        self.own_demand = 0
        self.entitled = math.inf
        """Workers that the jobs of this project, without its children, may have while others want theirs."""
        self.own_used = 0

    def add(self, workers: int, running: int = 0) -> None:
        self._changes[0] += 1
        self.own_used += workers
        for share in self.path:
            share.used += workers
            share.running += running

    def room(self) -> float:
        """Workers that the limits of the project and of its ancestors still allow."""
        if not self._limited:
            return math.inf
        return min((share.project.limit or 0) - share.used for share in self._limited)

    def spare_beside(self, other: Share) -> float:
        """Workers without which this project and its ancestors, as far as they are not the other's, would still have
        what is guaranteed to them."""
        return min(
            (share.used - least for share, least in self._guaranteed if share not in other.path), default=math.inf
        )

    def owed(self, workers: int) -> Share | None:
        """The project, this one or an ancestor, to which `workers` more workers are still guaranteed."""
        for share, least in self._guaranteed:
            if share.used + workers <= least:
                return share
        return None

    @property
    def has_guarantee(self) -> bool:
        """Something is guaranteed to it or to an ancestor."""
        return bool(self._guaranteed)

    def full_of_jobs(self) -> Share | None:
        """The project on the path that has as many running jobs as it may."""
        for share in self._capped:
            if share.running >= (share.project.max_running or 0):
                return share
        return None

    def order(self) -> tuple[bool, tuple[float, ...]]:
        """Whose turn it is, least first: what is guaranteed, then the least used share at each level from the root."""
        if self._ordered_at != self._changes[0]:
            is_below = any(share.used < least for share, least in self._guaranteed)
            self._order = (not is_below, tuple([share.used / weight for share, weight in self._levels]))
            self._ordered_at = self._changes[0]
        return self._order


class Shares:
    """The tree of projects."""

    def __init__(self, projects: Mapping[str, Project]) -> None:
        self._projects = projects
        self._shares: dict[str, Share] = {}
        self._changes = [0]

    def of(self, name: str) -> Share:
        """The share of a project; projects that are not listed have the default project's."""
        known = self._shares.get(name)
        if known is not None:
            return known
        name = name if name in self._projects else DEFAULT_PROJECT
        share = self._shares.get(name)
        if share is None:
            project = self._projects.get(name) or Project(name=name)
            parent = self.of(project.parent) if project.parent and self._is_below(name, project.parent) else None
            share = self._shares[name] = Share(project, parent, self._changes)
            if parent is not None:
                parent.children.append(share)
        return share

    def _is_below(self, name: str, parent: str) -> bool:
        """The parent is listed, and its ancestors do not lead back to the project."""
        seen = {name}
        above: str | None = parent
        while above is not None:
            if above in seen or above not in self._projects:
                return above not in seen and above != parent
            seen.add(above)
            above = self._projects[above].parent
        return True

    @property
    def all(self) -> list[Share]:
        return list(self._shares.values())

    def entitle(self, capacity: int) -> None:
        """Divide the capacity by max-min fairness with what each project can use."""
        for share in self._shares.values():
            share.demand = 0
        for share in self._shares.values():
            for ancestor in share.path:
                ancestor.demand += share.own_demand
        roots = [share for share in self._shares.values() if len(share.path) == 1]
        for share, entitled in zip(roots, divide(capacity, [_claim(share) for share in roots]), strict=True):
            _entitle_below(share, entitled)


def _entitle_below(share: Share, entitled: int) -> None:
    if not share.children:
        share.entitled = entitled
        return
    claims = [_claim(child) for child in share.children]
    own, *parts = divide(entitled, [(1.0, 0, share.own_demand), *claims])
    share.entitled = own
    for child, part in zip(share.children, parts, strict=True):
        _entitle_below(child, part)


def _claim(share: Share) -> tuple[float, int, int]:
    limit = share.project.limit
    most = share.demand if limit is None else min(share.demand, limit)
    return share.project.weight, min(share.project.guaranteed, most), most


def divide(capacity: int, claims: list[tuple[float, int, int]]) -> list[int]:
    """Whole workers by weighted max-min fairness; a claim is (weight, guaranteed, most).

    What is guaranteed comes first (less in proportion if it exceeds the capacity); the rest raises the claims with the
    least per weight, until each has its most. Exact in O(claims log claims) by the level at which claims are filled.
    """
    floors = [floor for _, floor, _ in claims]
    if sum(floors) > capacity:
        claims = [(max(floor, 1e-9), 0, floor) for floor in floors]
    low, high = 0.0, max((most / weight for weight, _, most in claims), default=0.0)
    if sum(most for _, _, most in claims) <= capacity:
        return [most for _, _, most in claims]

    def at(level: float) -> list[float]:
        return [min(float(most), max(float(floor), level * weight)) for weight, floor, most in claims]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= capacity else (low, middle)
    exact = at(low)
    whole = [int(part + 1e-6) for part in exact]
    by_fraction = sorted(range(len(claims)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_fraction[: capacity - sum(whole)]:
        whole[i] += whole[i] < claims[i][2]
    return whole
