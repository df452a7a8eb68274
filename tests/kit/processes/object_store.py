"""An S3 server of this machine (moto), and the settings by which a program finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server; yield its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def environment_of_s3(endpoint: str) -> dict[str, str]:
    """Return the variables that a user sets to reach a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def reach_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process, and those that it starts, reach a server."""
    for name, value in environment_of_s3(endpoint).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
