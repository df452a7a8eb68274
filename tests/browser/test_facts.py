"""The facts of a job's page that depend on its spec and on its validations."""

from __future__ import annotations

from typing import Any

import pytest

from kit.processes.chromium import Browser
from kit.processes.server import NUM_CPUS, Server
from kit.worlds.tiny_jobs import Submit

MORE_THAN_THERE_ARE: dict[str, Any] = {
    "workers": NUM_CPUS + 1,
    "min_workers": NUM_CPUS + 1,
    "batch": {"global_size": 10, "micro_size": 1},
}
"""A job that stays in the queue: its page is that of its spec."""


def _fact(browser: Browser, name: str) -> str | None:
    """What stands behind a name; None: the page has no such fact."""
    find = f"[...document.querySelectorAll('#facts dt')].find((one) => one.textContent === '{name}')"
    text: str | None = browser.run(f"{find}?.nextElementSibling.textContent ?? null")
    return text


def test_a_job_says_how_good_its_best_validation_was_and_another_one_that_it_continues_it(
    browser: Browser, shoal_server: Server, submit: Submit
) -> None:
    judged = submit(
        workers=1,
        steps=4,
        data_more={"validates": True},
        validation={"every_steps": 2, "samples": 10, "patience": 3},
        checkpoint={"every_steps": 4, "keep_best": 1},
    )
    standing = judged.finish().status.best
    assert standing is not None and standing.judged_step == 4
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{judged.id}")
    browser.sees("#facts", "Best validation")
    shown = _fact(browser, "Best validation") or ""
    metric, value, *rest = shown.split(" ")
    assert (metric, float(value)) == ("loss", pytest.approx(standing.best[0].value, rel=1e-3))
    assert " ".join(rest) == (
        f"after step {standing.best[0].step}, its checkpoint is kept (the best 1); "
        f"{standing.num_since} of 3 validations without an improvement"
    )
    assert _fact(browser, "Continues") is None and _fact(browser, "Begins with") is None

    following = submit(**MORE_THAN_THERE_ARE, steps=8, continue_from={"job": judged.id, "step": 4})
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{following.id}")
    browser.sees("#facts", "Continues")
    assert _fact(browser, "Continues") == f"{judged.id} after step 4"
    assert _fact(browser, "Best validation") is None and _fact(browser, "Begins with") is None
    browser.click("#facts a")
    browser.sees("#title", "SUCCEEDED")
    assert browser.run("location.pathname") == f"/jobs/{judged.id}", "the fact leads to the job"
    assert browser.complaints() == []
