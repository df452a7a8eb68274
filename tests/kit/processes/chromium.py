"""A real Chromium without a window, driven by Selenium: for the tests of the pages and for their pictures."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from selenium import webdriver
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 90.0
"""Far more than anything takes, so that a busy machine does not fail a test."""
_POLL_S = 0.05
_NOT_YET = (ElementNotInteractableException, StaleElementReferenceException)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
_NOISE = re.compile(r"WebGL|GPU stall|favicon|ERR_(CONNECTION|INCOMPLETE|EMPTY_RESPONSE|INTERNET|NETWORK|SOCKET)")
"""What a browser without a GPU prints, and what it prints about connections that a test cuts."""
CUT_OFF = (
    "[...document.querySelectorAll('main *')].filter((one) => !one.closest('svg, details, .skip, .chart') && "
    "one.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map((one) => one.outerHTML)"
)
"""Elements beyond the right edge of the window."""


class Browser:
    """One tab, or several of which one is used at a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def add_tab(self) -> str:
        """Adds an empty tab, and returns its handle for `use_tab`. It is used until another one is. Pages of all tabs
        count as visible."""
        self.driver.switch_to.new_window("tab")
        return self.driver.current_window_handle

    def use_tab(self, handle: str) -> None:
        self.driver.switch_to.window(handle)

    def log_in(self, link: str) -> None:
        """Gives the browser the session that a link begins, without loading a page.

        Args:
            link: the address of a server with the path of `Client.session_link`.
        """
        parts = urlsplit(link)
        [code] = parse_qs(parts.fragment)["code"]
        home = f"{parts.scheme}://{parts.netloc}"
        answer = httpx.post(f"{home}/v1/session", json={"code": code}, timeout=PATIENCE_S, trust_env=False)
        answer.raise_for_status()
        [(name, secret)] = answer.cookies.items()
        cookie = {"name": name, "value": secret, "url": home, "httpOnly": True, "sameSite": "Strict"}
        self.driver.execute_cdp_cmd("Network.setCookie", cookie)

    def forget(self) -> None:
        """Leaves the page, and forgets sessions, what the page has stored, the window's size, blocked addresses and
        complaints. What was loaded stays in the cache, so that the next server at the same address costs less."""
        self.run("location.protocol.startsWith('http') && sessionStorage.clear()")
        self.open("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})  # those of the host, whatever the port
        self.look()
        self.block()
        self.complaints()

    def block(self, *patterns: str) -> None:
        """Let requests for these addresses fail, in place of those of the last call. `forget` lets them pass again."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": list(patterns)})

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """The size of the window, and whether the user prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def text(self, selector: str) -> str:
        try:
            return " ".join(one.text for one in self.driver.find_elements(By.CSS_SELECTOR, selector))
        except StaleElementReferenceException:  # replaced while it was read
            return ""

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        """A page that is being drawn may still hide the element, or replace it."""
        wait = WebDriverWait(self.driver, PATIENCE_S, _POLL_S, ignored_exceptions=_NOT_YET)

        def click(driver: webdriver.Chrome) -> bool:
            driver.find_element(By.CSS_SELECTOR, selector).click()
            return True

        wait.until(click)

    def tick(self, selector: str) -> None:
        """Ticks a box. What arrives meanwhile moves the page under the pointer, so a click may miss it."""
        box = self.driver.find_element(By.CSS_SELECTOR, selector)
        while not box.is_selected():
            box.click()

    def fill(self, selector: str, text: str) -> None:
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def press(self, key: str) -> None:
        """On what has the focus."""
        self.driver.switch_to.active_element.send_keys(key)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Polls: the page tells nobody that it has rendered."""
        wait = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=_POLL_S)
        return wait.until(lambda _: condition(), f"{what}: not seen")

    def sees(self, selector: str, text: str) -> None:
        self.until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def complaints(self) -> list[str]:
        """Errors of scripts and violations of the content security policy since the last call."""
        found = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in found if not _NOISE.search(message)]


@contextmanager
def chromium(binary: str, driver: str) -> Iterator[Browser]:
    options = Options()
    options.binary_location = binary
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(running)
    finally:
        running.quit()
