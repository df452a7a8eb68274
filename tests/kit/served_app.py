"""An application on a free port, as `shoal serve` serves it, in a thread of the test."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from doubles.fake_cluster_source import FakeClusterSource
from shoal_api.http.app import create_app
from shoal_api.http.serving import make_server
from shoal_service.store import Store


@contextmanager
def served(app: FastAPI, *, address: socket.socket | None = None, **options: Any) -> Iterator[str]:
    """The URL; `options` are those of `make_server`.

    Args:
        address: a listening socket that stays open, for several servers one after the other. By default a new socket.
    """
    with socket.create_server(("127.0.0.1", 0)) if address is None else address.dup() as listener:
        scheme = options["http"].scheme if "http" in options else "http"
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"  # before the server takes the socket over
        server = make_server(app, host="127.0.0.1", port=0, **options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server does not stop"


def bare_app(store: Store, **options: Any) -> FastAPI:
    """The application over a store, with a played cluster and without metrics."""
    return create_app(store=store, cluster=FakeClusterSource(), scrape=lambda _: (b"", ""), version="1", **options)
