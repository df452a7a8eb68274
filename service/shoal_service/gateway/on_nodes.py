"""Runs functions on nodes, as Ray tasks and actors that reserve no CPU, where only the node itself can answer.

    packages of `code.pip`   listed and removed: they are local files of the workers, with whose account the tasks run
    storage of checkpoints   seen from where the workers are: the gateway's machine may have other mounts
    releases of Shoal        asked for when a supervisor could not be created: a node with another release is the most
                             probable reason, and no error of Ray names it
    a suspected node         tested: an actor on it, and one on a partner node, compute and communicate

Called by `RayCluster`. A node that does not answer in time is left out.

Processes that Ray starts before there is an actor for them: which nodes have one, and the request to a raylet.

A raylet keeps such a process idle until an actor with the same runtime environment comes, which then need not wait for
a process. Each of them becomes the process of one actor. If no actor comes, the process ends itself
(`shoal_workers/forkserver/idle.py`). Nothing depends on it: if a request is lost, Ray starts the process with the
actor. Called by `gateway/ray_cluster.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from shoal_service.cluster import gcs
from shoal_service.cluster.errors import ClusterUnreachable, GcsUnavailable
from shoal_service.cluster.gcs import RayNode
from shoal_service.clusters.wire import UnusedPackages
from shoal_service.core.quantities import count_text
from shoal_workers.ray_internals import request_idle_processes
from shoal_workers.version import VERSION

_PACKAGES_S = 60.0
"""Time for the start of a process on a busy node, and for the removal of some thousand files."""
_STORAGE_S = 30.0
_MOST_ASKED = 16
_RELEASE_S = 15.0
_START_S = 90.0
"""Time for the start of a process that imports torch on a busy machine."""
_TEST_S = 60.0
_NONE = "none"
_MOST = 5


async def unused_packages(nodes: Sequence[tuple[str, str]], for_s: float) -> tuple[UnusedPackages, ...]:
    """Packages that no process has used for at least `for_s`. Nodes that do not answer are left out.

    Args:
        nodes: ids and addresses.
        for_s: seconds without use.
    """
    answers = await asyncio.gather(
        *(call_on_node(node_id, _list_unused, for_s, within_s=_PACKAGES_S) for node_id, _ in nodes)
    )
    return tuple(
        UnusedPackages(node_id, ip, name, num_bytes, unused_s)
        for (node_id, ip), answer in zip(nodes, answers, strict=True)
        for name, num_bytes, unused_s in answer or ()
    )


async def remove_packages(node_id: str, name: str, for_s: float) -> bool:
    return bool(await call_on_node(node_id, _remove, name, for_s, within_s=_PACKAGES_S))


def _list_unused(for_s: float) -> list[tuple[str, int, float]]:
    """Runs on the node."""
    from shoal_workers.package_sets import root_of_node, unused

    return [
        (package_set.name, package_set.num_bytes, package_set.unused_s)
        for package_set in unused(root_of_node(), for_s=for_s)
    ]


def _remove(name: str, for_s: float) -> bool:
    """Runs on the node."""
    from shoal_workers.package_sets import remove, root_of_node

    return remove(root_of_node(), name, for_s=for_s)


async def sees_storage(nodes: Sequence[tuple[str, str]], url: str, name: str) -> str:
    """Why one of these nodes cannot read a job's checkpoints (`why_unreadable`); empty if all that answer can.

    Args:
        nodes: ids and addresses.

    Raises:
        ClusterUnreachable: no node has answered.
    """
    some = nodes[:_MOST_ASKED]
    calls = (call_on_node(node_id, _why_unreadable, url, name, within_s=_STORAGE_S) for node_id, _ in some)
    answers = await asyncio.gather(*calls)
    if not any(isinstance(answer, str) for answer in answers):
        raise ClusterUnreachable(f"no node has said within {_STORAGE_S:g} s whether it reads {url}")
    return next((f"on the node {ip}, {why}" for (_, ip), why in zip(some, answers, strict=True) if why), "")


def _why_unreadable(url: str, name: str) -> str:
    """Runs on the node."""
    from shoal_service.supervisor.checkpoints import why_unreadable

    return why_unreadable(url, name)


async def other_releases() -> str:
    """Says which nodes have another release than this process; empty if none has. Takes some seconds."""

    def release() -> str:  # inside a function: it is sent as it is, since an older release has no such module
        from importlib import import_module

        try:
            return str(import_module("shoal_workers.version").VERSION)
        except (ImportError, AttributeError):
            return "none"

    try:
        nodes = [node for node in await asyncio.to_thread(gcs.nodes) if node.is_alive and node.resources.get("CPU")]
    except GcsUnavailable:
        return ""
    calls = (call_on_node(node.node_id, release, within_s=_RELEASE_S) for node in nodes)
    releases = dict(zip((node.ip for node in nodes), await asyncio.gather(*calls), strict=True))
    return words_of(VERSION, {ip: version for ip, version in releases.items() if isinstance(version, str)})


def words_of(own: str, releases: Mapping[str, str]) -> str:
    """The same in words. `releases`: by address of the node; "none": Shoal is not installed there."""
    others = {ip: version for ip, version in sorted(releases.items()) if version != own}
    if not others:
        return ""
    named = [f"{ip} has {'no Shoal' if version == _NONE else version}" for ip, version in others.items()]
    more = f", and {count_text(len(named) - _MOST, 'more node')}" if len(named) > _MOST else ""
    return (
        f" The control plane is Shoal {own}, and {', '.join(named[:_MOST])}{more}: "
        "install the same release on every node."
    )


async def call_on_node(node_id: str, function: Any, *arguments: Any, within_s: float) -> Any:
    """Runs the function on the node, and returns its result; None if the node does not answer, or the function
    raises."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    answer = task.remote(*arguments)
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except (TimeoutError, RayError):
        ray.cancel(answer, force=True)
        return None


class NodeTestActor:
    """One process on one node, for one test of it. It is pinned to the node, reserves nothing but a GPU if the node has
    one, and is killed at the end of the test.

    It answers in words: an exception of torch would make the control plane, which reads it, import torch.
    """

    def matmul(self, device: str) -> str:
        """Computes on the device; says what was wrong, empty if nothing was."""
        from shoal_workers import node_test

        return _in_words(lambda: node_test.matmul_fault(device))

    def listen_at(self) -> tuple[str, int]:
        """An address that the partner can reach."""
        with socket.socket() as chosen:
            host = ray.util.get_node_ip_address()
            chosen.bind((host, 0))
            return host, chosen.getsockname()[1]

    def pair(self, rank: int, host: str, port: int, round_name: str, timeout_s: float) -> str:
        from shoal_workers import node_test

        return _in_words(lambda: node_test.pair_fault(rank, host, port, round_name=round_name, timeout_s=timeout_s))


def _in_words(test: Callable[[], str]) -> str:
    try:
        return test()
    except Exception as error:  # whatever it is, the node has not passed
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


async def fault_of_node(suspect: str, partner: str | None, *, has_gpu: bool) -> str:
    """Tests the suspected node, and says what was wrong; empty if it passed. Takes seconds, and two and a half minutes
    at most."""
    actors = [_start_test(suspect, has_gpu=has_gpu)]
    if partner is not None:
        actors.append(_start_test(partner, has_gpu=False))
    try:
        return await _tested(actors, "cuda" if has_gpu else "cpu")
    except TimeoutError:
        return f"the test did not end within {_START_S + _TEST_S:.0f} s"
    except RayError as error:
        return f"the process of the test failed: {str(error).strip().splitlines()[0]}"
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


async def _tested(actors: list[Any], device: str) -> str:
    suspect = actors[0]
    async with asyncio.timeout(_START_S):
        fault: str = await suspect.matmul.remote(device)
    if fault or len(actors) == 1:
        return fault
    for order in ((0, 1), (1, 0)):
        async with asyncio.timeout(_START_S):
            host, port = await actors[order[0]].listen_at.remote()
        async with asyncio.timeout(_TEST_S):
            halves = [
                actors[number].pair.remote(rank, host, port, f"suspect-{order}", _TEST_S / 2)
                for rank, number in enumerate(order)
            ]
            faults: list[str] = await asyncio.gather(*halves)
        if any(faults):
            return next(filter(None, faults))
    return ""


def _start_test(node_id: str, *, has_gpu: bool) -> Any:
    return (
        ray.remote(NodeTestActor)
        .options(
            num_cpus=0,
            num_gpus=1 if has_gpu else 0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )


_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_SETUP_TIMEOUT_S = 600
"""Ray's own limit for the setup of a runtime environment."""
SETTLE_S = 5.0
_RENEWED_BEFORE_S = 20.0


def prestart(node: RayNode, environment: str, *, number: int, keep_s: float, working_dir: str | None = None) -> None:
    """Request idle processes from the node's raylet; does not wait for them, and raises nothing.

    Args:
        environment: the serialized runtime environment, exactly as Ray writes it for the actor.
        keep_s: how long the raylet keeps a process that it does not use.
        working_dir: the URI of the code package in `environment`.
    """
    request_idle_processes(
        f"{node.ip}:{node.raylet_port}",
        environment,
        job_id=ray.get_runtime_context().get_job_id(),
        number=number,
        keep_s=keep_s,
        working_dir=working_dir or "",
        setup_s=_SETUP_TIMEOUT_S,
        timeout_s=_TIMEOUT_S,
        failed=lambda error: _log.info("prestart.failed", extra={"node": node.node_id, "error": str(error)}),
    )


class SupervisorReserve:
    """Decides on which node one process waits for the next supervisor. Pure; the times are passed in.

    A new process is started a while after the last supervisor was, so that it takes no time from that job's own start.
    It is on another node each time, so that the supervisors of many jobs are not on one. No process waits until the
    first supervisor was started.
    """

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: a process that is not used ends after this time."""
        self._keep_s = keep_s
        self._environment = ""
        """The runtime environment of the last supervisor; the next one is expected to have the same."""
        self._node_id = ""
        self._reserved_for = ""
        """The environment of the process that waits."""
        self._last_node_id = ""
        self._ends_at = -math.inf
        self._renew_at = math.inf

    def take(self, environment: str, usable: Collection[str], now: float) -> str:
        """Uses up the process that waits, and returns its node; empty: no process fits this supervisor."""
        self._renew_at = now + SETTLE_S
        fits = environment == self._reserved_for and self._node_id in usable and now < self._ends_at
        self._environment = environment
        if not fits:
            return ""
        node_id, self._node_id = self._node_id, ""
        return node_id

    def is_due(self, now: float) -> bool:
        """Return whether `renew` may have something to do."""
        return now >= self._renew_at

    def renew(self, nodes: Sequence[str], now: float) -> tuple[str, str] | None:
        """Chooses where a process is started now: the node, and its runtime environment; None if none is to be started.

        Args:
            nodes: the usable nodes, in any order; the same ones in each call, except those that have come or gone.
        """
        if not self.is_due(now) or not nodes:
            return None
        is_fit = self._reserved_for == self._environment
        if is_fit and self._node_id in nodes and now < self._ends_at - _RENEWED_BEFORE_S:
            self._renew_at = self._ends_at - _RENEWED_BEFORE_S
            return None
        following = sorted(nodes)
        self._node_id = next((node for node in following if node > self._last_node_id), following[0])
        self._last_node_id, self._ends_at = self._node_id, now + self._keep_s
        self._reserved_for = self._environment
        self._renew_at = self._ends_at - _RENEWED_BEFORE_S
        return self._node_id, self._environment
