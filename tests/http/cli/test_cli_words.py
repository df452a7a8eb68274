"""The help, and the words that people bring from other tools, against a real server."""

import re
from typing import Any

import pytest

from shoal_api.cli.main import COMMANDS, PANELS


def test_the_help_has_the_ten_commands_of_every_day_first_and_fits_on_a_screen(shoal: Any) -> None:
    lines = shoal("--help", columns=80).out.splitlines()
    first = next(number for number, line in enumerate(lines) if "Every day" in line)
    every_day = [line.split()[1] for line in lines[first + 1 : first + 11]]
    assert every_day == list(PANELS["Every day"]), "one line for each"
    assert len(lines) <= 50, "\n".join(lines)
    words = set(re.findall(r"[a-z-]+", "\n".join(lines[first:])))
    assert {name.split()[0] for name in COMMANDS} <= words, "no command is missing"


@pytest.mark.parametrize("word", ["ps", "ls", "list", "status"])
def test_words_of_other_tools_list_the_jobs(shoal: Any, service: Any, word: str) -> None:
    service.add_job(name="first")
    assert shoal(word).out == shoal("jobs").out and "first" in shoal(word).out
    assert shoal(word, "--json").json() == shoal("jobs", "--json").json()


@pytest.mark.parametrize("word", ["status", "why", "describe"])
def test_words_of_other_tools_show_a_job(shoal: Any, service: Any, word: str) -> None:
    job = service.add_job(name="first")
    assert shoal(word, "first", "--json").json() == shoal("show", job.id, "--json").json()


def test_why_without_a_job_shows_why_jobs_wait(shoal: Any, service: Any) -> None:
    job = service.add_job(name="first")
    assert [item["job_id"] for item in shoal("why", "--json").json()["items"]] == [job.id]


@pytest.mark.parametrize("word", ["stop", "kill"])
def test_words_that_could_mean_two_things_name_both_commands_for_this_job(shoal: Any, service: Any, word: str) -> None:
    job = service.add_job(name="first")
    ran = shoal(word, "first")
    assert ran.code == 2 and service.store.get_job(job.id).status.state == "QUEUED"
    for command in ("shoal pause first", "shoal cancel first"):
        assert f"`{command}`" in ran.err
        assert shoal(*command.split()[1:]).code == 0, "the sentence names commands that work"


def test_an_alias_has_the_help_of_its_command(shoal: Any) -> None:
    assert "shoal jobs" in shoal("ps", "--help").out
