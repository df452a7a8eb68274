"""Each kind of wait for another machine is on /metrics, with its bound; a wait without a bound names what ends it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal_api
import shoal_service
from doubles.event_loop import run
from kit.scrapes import scrape, value_of
from shoal_service import control
from shoal_service.clock import SystemClock
from shoal_service.clusters.verbs import VERBS
from shoal_service.control.job_storage import JobStorage, StorageAway
from shoal_service.control.joined_clusters import JoinedClusters
from shoal_service.control.oidc import Issuer, IssuerConfig
from shoal_service.control.webhooks import Notifier
from shoal_service.store import Store
from shoal_service.telemetry.tallies import WaitTallies


def test_a_wait_for_storage_is_counted_and_ends_at_its_bound(store: Store) -> None:
    waits, hangs = WaitTallies(), threading.Event()
    storage = JobStorage("", waits)

    async def main() -> None:
        assert await storage.run(lambda: 7, within_s=30.0) == 7
        with pytest.raises(StorageAway, match=r"within 0\.02 s"):
            await storage.run(hangs.wait, within_s=0.02)

    run(main())
    hangs.set()
    storage.close()
    samples = scrape(store, waits=waits)
    assert value_of(samples, "shoal_wait_seconds_count", what="storage") == 2
    assert value_of(samples, "shoal_wait_limit_seconds", what="storage") == 0.02
    assert value_of(samples, "shoal_waits_ended_total", what="storage") == 1


def test_each_kind_of_wait_is_shown_with_its_bound_before_the_first_one(store: Store) -> None:
    waits = WaitTallies()
    clusters, storage = JoinedClusters(store, "here", SystemClock(), lambda: None, waits), JobStorage("", waits)
    Issuer(IssuerConfig(issuer="https://issuer", audience="shoal"), waits=waits)
    Notifier(10.0, waits).close()
    storage.close()
    clusters.close()
    samples = scrape(store, waits=waits)
    for what in (*VERBS, "storage", "issuer", "webhook"):
        assert value_of(samples, "shoal_wait_limit_seconds", what=what) > 0, what
        assert value_of(samples, "shoal_waits_ended_total", what=what) == 0, what


_BARE = {
    ("job_storage.py", "verify"): "a request waits for a reading that goes on without it, and whose view says how far",
    ("planning.py", "answer"): "a process of this machine",
}


def test_the_control_plane_bounds_no_wait_for_another_machine_without_counting_it() -> None:
    """`asyncio.timeout` and `asyncio.wait_for` bound a wait that no metric shows: `WaitTallies.bounded` does both."""
    bare = []
    for path in sorted(Path(control.__file__).parent.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef):
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if calls & {"asyncio.timeout", "asyncio.wait_for"}:
                    bare.append((path.name, function.name))
    assert sorted(bare) == sorted(_BARE)


_IDLE = "it has nothing to do until then, and its owner cancels it"
_KILLED = "a process of this machine that was killed"
_CALLERS = "whoever awaits it has a bound"

_UNBOUNDED = {
    ("clock.py", "wait_for_any"): _CALLERS,
    ("cluster/embedded_cluster.py", "_start_together"): "`ray start` has ended, or its session was killed at the limit",
    ("control/driver.py", "_steer"): _IDLE,
    ("control/gateway_process.py", "stop"): _KILLED,
    ("control/joined_clusters.py", "close"): "a thread that was told to end",
    ("control/planning.py", "_ask"): "a process that has closed its output, and `answer` has a bound",
    ("control/planning.py", "_end_process"): _KILLED,
    ("gateway/gateway.py", "_look_now"): "the order that looks is cancelled at the bound of its verb",
    ("gateway/gateway.py", "_ordering"): "no orders are taken before the service has admitted it, which `run` says",
    ("gateway/gateway.py", "run"): "the life of a gateway: a signal, or the end of a loop",
    ("store/backup.py", "_run_psql"): "a process whose output has ended; a person waits for the restoration",
    ("supervisor/journal.py", "_write_forever"): _IDLE,
    ("supervisor/workers/worker_client.py", "_carry_out"): "the adoption is repeated until the worker is lost",
    (
        "supervisor/workers/worker_client.py",
        "_poll_directly",
    ): "the poll is answered after `wait_s`, or the worker is lost",
    ("demo/processes.py", "stop"): _KILLED,
    ("http/streams.py", "while_connected"): "the client goes, or the work, whose waits have bounds, is done",
    ("serve.py", "_stop"): "the life of a server: a signal; then it has SHOAL_STOP_S",
}
"""What ends each wait of service and API that has no bound where it stands."""


def unbounded_waits(tree: ast.AST, function: str = "") -> Iterator[str]:
    """The functions with calls of `wait`, `wait_for` or `join` that have no limit, nor are within a block that has."""
    match tree:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            function = name
        case ast.AsyncWith(items=items) if any(
            isinstance(item.context_expr, ast.Call)
            and ast.unparse(item.context_expr.func).endswith(("timeout", "bounded"))
            for item in items
        ):
            return
        case ast.Call(func=ast.Attribute(value=of, attr=("wait" | "wait_for" | "join") as verb)):
            num_awaited = int(verb == "wait_for" or ast.unparse(of) == "asyncio")
            has_limit = len(tree.args) > num_awaited or any(keyword.arg == "timeout" for keyword in tree.keywords)
            if has_limit and verb == "wait_for":
                return  # what is awaited is bounded, too
            if not has_limit:
                yield function
    for child in ast.iter_child_nodes(tree):
        yield from unbounded_waits(child, function)


def test_a_wait_without_a_bound_names_what_ends_it() -> None:
    waits = {
        (path.relative_to(root).as_posix(), function)
        for root in (Path(package.__path__[0]) for package in (shoal_service, shoal_api))
        for path in root.rglob("*.py")
        for function in unbounded_waits(ast.parse(path.read_text()))
    }
    assert waits == {*_UNBOUNDED}


def test_a_wait_without_a_bound_is_seen() -> None:
    text = """
async def first(): await event.wait()
async def second():
    async with asyncio.timeout(3.0):
        await event.wait()
async def third(): await asyncio.wait_for(event.wait(), 3.0)
async def fourth(): await asyncio.wait([task], return_when=asyncio.FIRST_COMPLETED)
def fifth(): thread.join(3.0)
def sixth(): return ", ".join(names)
"""
    assert [*unbounded_waits(ast.parse(text))] == ["first", "fourth"]
