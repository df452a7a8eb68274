"""Behind a proxy that encrypts: what a trusted one says about its client holds, what another says does not."""

import time
from pathlib import Path

import httpx
import pytest

from doubles.fake_cluster_source import FakeClusterSource
from kit.served_app import served
from shoal_api.client.credentials import find_token
from shoal_api.http.app import create_app
from shoal_api.http.serving import Wire
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.settings import SettingsError, load_settings
from shoal_service.store import Store

FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.9"}


@pytest.mark.parametrize(
    ("proxies", "address"),
    [("127.0.0.1", "203.0.113.9"), ("127.0.0.0/8", "203.0.113.9"), ("10.0.0.1", "127.0.0.1"), ("", "127.0.0.1")],
)
def test_only_a_trusted_proxy_says_who_its_client_is_and_that_it_encrypts(
    store: Store, state_dir: Path, proxies: str, address: str
) -> None:
    ensure_admin_token(store, state_dir, now=time.time())
    app = create_app(store=store, cluster=FakeClusterSource(), scrape=lambda _: (b"", ""), version="1")
    with (
        served(app, wire=Wire(trusted_proxies=proxies)) as url,
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
