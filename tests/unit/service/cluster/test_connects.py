"""A host answers if its kernel accepts or refuses; real sockets, and a port whose queue of connections is full."""

import socket
import threading
from contextlib import closing, suppress

from shoal_service.cluster.connects import answers


def test_a_port_that_accepts_and_one_that_refuses_are_answers() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        assert answers("127.0.0.1", port, within_s=5.0)
    assert answers("127.0.0.1", port, within_s=5.0)


def test_a_kernel_that_drops_connects_does_not_answer_until_it_takes_them() -> None:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener:
        address = listener.getsockname()
        with closing(socket.create_connection(address)), suppress(OSError):
            assert not answers(*address, within_s=0.7)
            taker = threading.Timer(0.3, lambda: [listener.accept()[0].close() for _ in range(2)])
            taker.start()
            assert answers(*address, within_s=30.0)
            taker.join()
