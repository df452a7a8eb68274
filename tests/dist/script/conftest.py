"""Fixtures of tests that run scripts on real runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes.script_bench import Events, ForkServer, ScriptBench, write_script


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("f"))
    yield server
    server.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """What the scripts of the test say."""
    events = Events()
    monkeypatch.setenv("SHOALTEST_EVENTS", events.address)
    yield events
    events.close()


@pytest.fixture
def bench(
    fork_server: ForkServer, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ScriptBench]]:
    """`bench(text, num_workers)`: runners of a script with this text, whose guardians are forked from the fork server.
    `script` and other keys change the spec."""
    made: list[ScriptBench] = []
    monkeypatch.setenv("SHOAL_FORK_SERVER", fork_server.address)
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def make(
        text: str,
        num_workers: int = 1,
        *,
        script: dict[str, Any] | None = None,
        nodes: tuple[str, ...] = (),
        **changes: Any,
    ) -> ScriptBench:
        write_script(folder, text)
        made.append(ScriptBench(folder, {"file": "train.py", **(script or {})}, num_workers, nodes, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()
