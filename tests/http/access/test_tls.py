"""TLS by certificate files, no address beyond loopback without it, and what a trusted proxy says about its client."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.certificates import make_certificates
from kit.served_app import bare_app, served
from shoal_api.client import Client, Disconnected
from shoal_api.client.credentials import find_token
from shoal_api.client.transport import RetryPolicy
from shoal_api.http.serving import HttpConfig
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.problems import SettingsError
from shoal_service.settings import load_settings
from shoal_service.store import Store

ONCE = RetryPolicy(num_retries=0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Those of an authority and of 127.0.0.1, and the key of the latter."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "made")


@pytest.fixture
def https(store: Store, state_dir: Path, certificates: tuple[Path, Path, Path]) -> Iterator[str]:
    ensure_admin_token(store, state_dir, now=time.time())
    app = bare_app(store)
    with served(app, http=HttpConfig(*certificates[1:])) as url:
        yield url


def test_a_client_takes_the_file_of_the_authority(
    https: str, certificates: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(https, ca_file=certificates[0]) as client:
        assert client.whoami().role == "admin"
    with Client(https, retry=ONCE) as client, pytest.raises(Disconnected, match="CERTIFICATE_VERIFY_FAILED"):
        client.whoami()
    monkeypatch.setenv("SHOAL_CA_FILE", str(certificates[0]))
    with Client(https) as client:
        assert client.whoami().role == "admin"
        code = client.session_link().code
    context = ssl.create_default_context(cafile=certificates[0])
    answer = httpx.post(f"{https}/v1/session", json={"code": code}, verify=context, trust_env=False)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" in cookie


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "shoal.example"])
def test_an_address_beyond_loopback_needs_tls_or_a_word(
    host: str, tmp_path: Path, certificates: tuple[Path, Path, Path]
) -> None:
    given: dict[str, Any] = {"state_dir": tmp_path, "host": host}
    with pytest.raises(SettingsError, match=r"beyond loopback.*--tls-cert.*SHOAL_ALLOW_PLAIN_HTTP"):
        load_settings(**given)
    assert load_settings(**given, allow_plain_http=True).host == host
    assert load_settings(**given, tls_cert=certificates[1], tls_key=certificates[2]).host == host
    with pytest.raises(SettingsError, match="give both, or neither"):
        load_settings(**given, tls_cert=certificates[1])
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(**given, tls_cert=certificates[1], tls_key=tmp_path / "none")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_neither(host: str, tmp_path: Path) -> None:
    assert load_settings(state_dir=tmp_path, host=host).host == host


FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}


@pytest.mark.parametrize(
    ("proxies", "address"),
    [("127.0.0.1", "203.0.113.9"), ("127.0.0.0/8", "203.0.113.9"), ("10.0.0.1", "127.0.0.1"), ("", "127.0.0.1")],
)
def test_only_a_trusted_proxy_says_who_its_client_is_and_that_it_encrypts(
    store: Store, state_dir: Path, proxies: str, address: str
) -> None:
    ensure_admin_token(store, state_dir, now=time.time())
    app = bare_app(store)
    with (
        served(app, http=HttpConfig(trusted_proxies=proxies)) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False, headers=FORWARDED) as http,
    ):
        answer = http.post("/v1/session", json={"token": find_token("http://127.0.0.1:1")})
        assert ("Secure" in answer.headers["set-cookie"]) == (address != "127.0.0.1")
        own = {"Authorization": f"Bearer {find_token('http://127.0.0.1:1')}"}
        assert http.put("/v1/projects/vision", json={"weight": 2.0}, headers=own).is_success
        record = http.get("/v1/audit", headers=own).json()["items"][0]
        assert record["address"] == address


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.1/8", "10.0.0.1,,10.0.0.2", "10.0.0.1 10.0.0.2"])
def test_a_proxy_is_given_by_its_address(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"trusted_proxies '.*give addresses or networks, not names"):
        load_settings(trusted_proxies=wrong)
    assert load_settings(trusted_proxies="10.0.0.1, 10.1.0.0/16").trusted_proxies == "10.0.0.1, 10.1.0.0/16"
