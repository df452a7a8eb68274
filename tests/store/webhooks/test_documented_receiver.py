"""The receiver in docs/webhooks.md accepts what Shoal sends, and refuses what was signed with another secret."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.webhooks import SECRET, SECRET_NAME, config_of, delivering
from shoal_service.store import Lease, Store

PAGE = Path(__file__).resolve().parents[3] / "docs" / "webhooks.md"
OTHER = "the secret of someone else"


@pytest.fixture(params=[SECRET, OTHER])
def receiver(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The URL and the secret of a process that runs the page's receiver."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"SECRET": request.param, "PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/", request.param
    finally:
        process.kill()
        process.wait()


def test_the_receiver_of_the_page_accepts_only_its_own_secret(
    store: Store,
    owned: Lease,
    submit: Callable[..., str],
    reach: Callable[..., Any],
    receiver: tuple[str, str],
) -> None:
    url, secret = receiver
    with delivering(store, config_of(), lambda: owned):
        job_id = submit(now=time.time(), webhooks=[{"url": url, "events": ["job.created"], "secret": SECRET_NAME}])
        if secret == SECRET:
            assert reach(job_id, lambda view: view.delivered == 1).gave_up == 0
        else:
            assert reach(job_id, lambda view: view.error == "has answered 401").delivered == 0
