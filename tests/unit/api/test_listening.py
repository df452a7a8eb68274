"""The address that a server listens on, and the words if it cannot."""

import socket

import pytest

from shoal_api.serve import _listen, _netloc


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here"))]
)
def test_a_server_listens_on_addresses_of_both_kinds(host: str) -> None:
    with _listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]) as connection:
        assert connection.getpeername()[0] == host


def test_the_words_name_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*Choose another with --port"):
            _listen("127.0.0.1", port)
    with pytest.raises(SystemExit, match=r"cannot listen on 192\.0\.2\.1:0: .*Is --host an address of this machine\?"):
        _listen("192.0.2.1", 0)


def test_an_address_with_colons_has_brackets_in_a_url() -> None:
    assert (_netloc("::1", 8265), _netloc("127.0.0.1", 80)) == ("[::1]:8265", "127.0.0.1:80")
