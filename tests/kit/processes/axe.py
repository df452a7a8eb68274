"""Runs axe-core on the page that is open, and checks what axe-core has no rule for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kit.processes.chromium import Browser

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]

_UNSHAPED = """[
  ...[...document.querySelectorAll('table')].filter((one) => !one.caption?.textContent.trim())
    .map((one) => ['table-caption', one]),
  ...[...document.querySelectorAll('th:not([scope])')].map((one) => ['th-scope', one]),
  ...[...document.querySelectorAll('h1')].filter((one) => one.checkVisibility()).slice(1).map((one) => ['one-h1', one]),
  ...([...document.querySelectorAll('h1')].some((one) => one.checkVisibility() && one.textContent.trim())
    ? [] : [['one-h1', document.body]]),
  ...[...document.querySelectorAll('button, select, input, textarea, summary, a.button')].filter((one) => {
    const {width, height} = (one.closest('label') ?? one).getBoundingClientRect();
    return one.checkVisibility() && width && !one.closest('.skip') && Math.min(width, height) < 23.5;
  }).map((one) => ['target-24px', one])]
  .filter(([, one]) => !EXCLUDED.some((selector) => one.closest(selector)))
  .map(([rule, one]) => `${rule}: ${one.outerHTML.slice(0, 160)}`)"""
"""Tables without a caption, heads without a scope, a page without one visible h1, controls smaller than 24 px."""


@cache
def _axe() -> str:
    spec = find_spec("axe_core_python")
    assert spec is not None and spec.submodule_search_locations, "axe-core-python is in the extra `dev`"
    return Path(spec.submodule_search_locations[0], "axe.min.js").read_text()


def violations(browser: Browser, excluded: Sequence[str] = (), *, colours_only: bool = False) -> list[str]:
    """Return what axe finds on the page that is open: rule, element, and what is wrong with it."""
    if not browser.run("'axe' in window"):
        browser.driver.execute_script(_axe())
    script = """const [levels, excluded, coloursOnly, done] = arguments;
        const rules = axe.getRules(levels).filter(({tags}) => !tags.includes('experimental')
          && !tags.includes('deprecated') && (!coloursOnly || tags.includes('cat.color')));
        const runOnly = {type: 'rule', values: rules.map((one) => one.ruleId)};
        axe.run({exclude: excluded.map((one) => [one])}, {runOnly, resultTypes: ['violations'], preload: false})
          .then(({violations}) => done(violations), (error) => done(String(error)));"""
    found: Any = browser.driver.execute_async_script(script, LEVELS, [*excluded], colours_only)
    assert isinstance(found, list), found
    unshaped = [] if colours_only else browser.run(_UNSHAPED.replace("EXCLUDED", json.dumps([*excluded])))
    return [
        *unshaped,
        *(
            f"{one['id']}: {node['html'][:160]}: {node['failureSummary'].splitlines()[-1].strip()}"
            for one in found
            for node in one["nodes"]
        ),
    ]
