"""The login page of a service whose jobs a test has written."""

from __future__ import annotations

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import Service

pytestmark = pytest.mark.first


def test_a_login_link_that_is_pasted_into_a_tab_at_the_login_page_logs_in(stranger: Browser, written: Service) -> None:
    with written.client as client:
        used, link = client.session_link().path, client.session_link().path
    stranger.run(f"(window.isSamePage = true, location.href = '{written.url}/login#code=wrong', 1)")
    stranger.until(lambda: stranger.text("#verdict"), "a code that is unknown is refused")
    assert used != link and stranger.run("window.isSamePage"), "the browser only changed what is behind the #"
    stranger.run(f"(location.href = '{written.url}{link}', 1)")
    stranger.until(lambda: stranger.run("location.pathname") == "/docs", "the page that was asked for first")
