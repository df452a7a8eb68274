"""A person at a browser: clicks on what has a name, fills fields, presses keys, and each of them is counted.

It finds controls by what they say: the text of a button or link, the label of a field, the name for a screen reader. A
click on something that is not there yet waits for it; a click that misses, since what arrived has moved the page, is
made again and counted once.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from kit.processes.chromium import Browser
from kit.worlds.written_service import Service

_MISSED = (ElementClickInterceptedException, ElementNotInteractableException, StaleElementReferenceException)
_FIND_CONTROL = """const [name, within] = arguments;
const of = document.querySelector('dialog[open]') ?? document.querySelector(within);
const said = (one) => (one.getAttribute('aria-label') ?? one.textContent).trim().replace(/ [▾▴]$/, '');
const kinds = 'button, a, summary, [role=option], input[type=checkbox], input[type=range]';
const own = (one) => one.labels?.length ? one.labels[0].textContent.trim() : said(one);
return [...(of?.querySelectorAll(kinds) ?? [])].find((one) =>
  one.checkVisibility() && !one.disabled && (said(one) === name || own(one) === name)) ?? null;"""
_FIND_FIELD = """const [name] = arguments;
const of = document.querySelector('dialog[open]') ?? document;
const label = (one) => one.labels?.length
  ? [...one.labels[0].childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join(' ').trim() : '';
const referred = (one) => document.getElementById(one.getAttribute('aria-labelledby'))?.textContent ?? '';
return [...of.querySelectorAll('input, select, textarea')].find((one) => one.checkVisibility() &&
  [one.getAttribute('aria-label'), label(one), referred(one)].some((said) => said && said.trim() === name)) ?? null;"""
_SELECT_WORDS = """const [field, words] = arguments, at = field.value.indexOf(words);
if (at >= 0) { field.focus(); field.setSelectionRange(at, at + words.length); }
return at >= 0;"""


@dataclass
class Counts:
    """What a task took."""

    clicks: int = 0
    texts: int = 0
    """Fields that were filled, the click into the field included."""
    keys: int = 0


@dataclass
class Person:
    """Stands at the page of all jobs when a task begins."""

    browser: Browser
    downloads: Path
    """Where the browser saves files."""
    counts: Counts = field(default_factory=Counts)

    def click(self, name: str, within: str = "body") -> None:
        """The control with this text, label or name; within an open dialog, if there is one."""
        self._click(lambda: self._found(_FIND_CONTROL, name, within), repr(name))

    def click_at(self, selector: str) -> None:
        """What has no name that the task could know, such as the first row of a table."""
        find = f"return [...document.querySelectorAll({selector!r})].find((one) => one.checkVisibility()) ?? null"
        self._click(lambda: self.browser.driver.execute_script(find), selector)

    def choose(self, name: str, option: str) -> None:
        """From a list of choices: a click opens it, another one chooses."""
        control = self._until(lambda: self._found(_FIND_FIELD, name), f"the field {name!r}")
        script = "return [...arguments[0].options].find((one) => one.text === arguments[1]) ?? null"
        self._until(lambda: self.browser.driver.execute_script(script, control, option), f"the choice {option!r}")
        self.browser.driver.execute_script(script, control, option).click()
        self.counts.clicks += 2

    def fill(self, name: str, text: str) -> None:
        control = self._until(lambda: self._found(_FIND_FIELD, name), f"the field {name!r}")
        control.clear()
        control.send_keys(text)
        self.counts.texts += 1

    def fill_time(self, name: str, at: datetime) -> None:
        """A field of a date and a time, part by part, as Chromium's field in American English takes them."""
        control = self._until(lambda: self._found(_FIND_FIELD, name), f"the field {name!r}")
        control.send_keys(f"{at:%m%d%Y}{Keys.TAB}{at:%I%M%S%p}")
        self.counts.texts += 1

    def replace(self, name: str, words: str, by: str) -> None:
        """Selects words in a text with the pointer, and types over them."""
        control = self._until(lambda: self._found(_FIND_FIELD, name), f"the field {name!r}")
        select = self.browser.driver.execute_script
        self._until(lambda: select(_SELECT_WORDS, control, words), f"{words!r} in the field {name!r}")
        control.send_keys(by)
        self.counts.clicks += 1
        self.counts.texts += 1

    def press(self, key: str) -> None:
        self.browser.press(key)
        self.counts.keys += 1

    def search(self, text: str) -> None:
        """Opens the search over everything, types, and opens the first that it finds."""
        self.browser.until(lambda: self.browser.count("#site-search"), "the search")
        self.press("/")
        self.fill("Search everything", text)
        self.sees(text, "#site-found [aria-selected=true]")
        self.press(Keys.ENTER)
        self.browser.until(lambda: self.browser.run("location.pathname") != "/", "the page that was found")

    def sees(self, text: str, within: str = "main") -> None:
        """The text is on the screen, or comes there."""
        self.browser.sees(within, text)

    def sees_picture(self, name: str) -> None:
        """A chart or image whose name for a screen reader begins so."""
        names = "[...document.querySelectorAll('[aria-label], img')].filter((one) => one.checkVisibility())"
        label = "one.getAttribute('aria-label') ?? one.alt ?? ''"
        script = f"{names}.some((one) => ({label}).startsWith({name!r}))"
        self.browser.until(lambda: self.browser.run(script), f"the picture {name!r}")

    def sees_rows(self, *names: str, within: str = "#jobs") -> None:
        """The rows of the table are these jobs, in this order."""
        script = f"[...document.querySelectorAll('{within} tr td.title:not(:has(.badge)) a')].map((one) => one.text)"
        self.browser.until(lambda: self.browser.run(script) == list(names), f"the jobs {names}")

    def waits_until_closed(self) -> None:
        self.browser.until(lambda: self.browser.count("dialog[open]") == 0, "the dialog is closed")

    @property
    def place(self) -> str:
        """The page on which the person is, without ids."""
        path, tab = self.browser.run("[location.pathname, location.hash]")
        path = re.sub(r"/jobs/[\w-]+", "/jobs/JOB", path)
        found = re.match(r"#tab=(\w+)", tab)
        return f"{path}#tab={found[1]}" if found else path

    def _found(self, script: str, *arguments: str) -> WebElement | None:
        element: WebElement | None = self.browser.driver.execute_script(script, *arguments)
        return element

    def _until(self, find: Callable[[], Any], what: str) -> Any:
        return self.browser.until(find, what)

    def _click(self, find: Callable[[], WebElement | None], what: str) -> None:
        def clicked() -> bool:
            element = find()
            if element is None:
                return False
            try:
                element.click()
            except _MISSED:
                return False
            return True

        self._until(clicked, what)
        self.counts.clicks += 1


class Doing(Protocol):
    def __call__(self, person: Person, service: Service) -> None: ...


@dataclass(frozen=True)
class Task:
    """`words`: what the researcher wants. `do`: how, with the assertion that the answer is on the screen."""

    words: str
    do: Doing

    @property
    def name(self) -> str:
        return self.do.__name__  # type: ignore[attr-defined, no-any-return]


def task(words: str, tasks: list[Task]) -> Callable[[Doing], Doing]:
    """Adds the function that is decorated to the tasks."""

    def add(do: Doing) -> Doing:
        tasks.append(Task(words, do))
        return do

    return add
