"""The pages in a real browser: what a person sees, driven over Chromium's DevTools protocol.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from shoal_service.views import Goodput, IncidentView, JobStatus
from shoal_workers.contract.job import IncidentCause, JobState

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running browser's DevTools, host:port."""
    profile = tmp_path_factory.mktemp("chromium")
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert browser.stderr is not None
        address = next(found.group(1) for line in browser.stderr if (found := re.search(r"ws://([^/]+)/", line)))
        yield address
    finally:
        browser.kill()
        browser.communicate()


async def read_page(devtools: str, url: str, *, until: str) -> tuple[str, list[str]]:
    """The text of the page once it contains `until`, and every error of its scripts."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{devtools}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"]) as socket:
            complaints: list[str] = []
            number = 0

            async def call(method: str, **params: Any) -> Any:
                nonlocal number
                number += 1
                await socket.send_json({"id": number, "method": method, "params": params})
                while True:
                    message = await socket.receive_json()
                    if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                        complaints.append(str(message["params"]))
                    if message.get("id") == number:
                        return message["result"]

            await call("Runtime.enable")
            await call("Log.enable")
            await call("Page.navigate", url=url)
            text = ""
            async with asyncio.timeout(PATIENCE_S):
                while until not in text:
                    shown = await call("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
                    text = str(shown["result"].get("value", ""))
                    await asyncio.sleep(0.05)  # the page sends no signal when it has rendered
            return text, complaints


def test_the_job_page_shows_a_job_its_progress_and_its_workers(
    service: Any, supervise: Callable[..., str], devtools: str, spec: dict[str, Any]
) -> None:
    job_id = supervise()
    text, complaints = asyncio.run(read_page(devtools, f"{service.url}/#{job_id}", until=job_id))
    assert spec["name"] in text
    assert complaints == []


GOODPUT = Goodput(
    at=4e9,
    seconds={"productive": 300.0, "recovering": 60.0, "degraded": 40.0},
    recovering={"worker_died": 60.0},
    total=400.0,
    ratio=0.75,
)
INCIDENT = IncidentView(
    id=1,
    cause=IncidentCause.WORKER_DIED,
    witness="run call",
    ranks=(2,),
    worker_ids=("s2",),
    generation=1,
    at=1.7e9,
    from_workers=4,
    to_workers=3,
    detect_s=0.05,
    quiesce_s=0.03,
    plan_s=0.01,
    form_s=0.1,
    restore_s=0.04,
    first_step_s=0.2,
    recovery_s=0.38,
    state_source="memory",
    bytes_moved=3 * 2**20,
    steps_lost=1,
    action="restart process, shrink",
    closed=True,
    message="killed",
)


def test_the_job_page_shows_where_the_time_went_and_what_went_wrong(
    service: Any, supervise: Callable[..., str], devtools: str
) -> None:
    status = JobStatus(state=JobState.RUNNING, goodput=GOODPUT, snapshot_every_steps=1, snapshot_share=0.004, workers=3)
    job_id = supervise(status=status, incidents=(INCIDENT,))
    text, complaints = asyncio.run(read_page(devtools, f"{service.url}/#{job_id}", until="memory, 3 MiB"))
    for words in (
        "75 % of 6.67 min of requested worker time",
        "(worker died 60 s)",
        "every step, 0.4 %",
        "restart process, shrink",
        "4 → 3",
        "0.38 s",
        "memory",
        "first step",
    ):
        assert words in text
    assert complaints == []


def test_the_documentation_page_draws_the_routes_of_the_openapi_document(service: Any, devtools: str) -> None:
    text, complaints = asyncio.run(read_page(devtools, f"{service.url}/docs", until="/v1/jobs/{job_id}/events"))
    assert "Submit a job" in text and "/v1/cluster" in text
    assert complaints == []
