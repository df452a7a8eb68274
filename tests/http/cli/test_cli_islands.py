"""`shoal submit` of a spec with islands makes a job for each; `shoal rounds` shows how they merge."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kit import island_rounds as kit
from kit.worlds.written_service import SPEC
from shoal_service.store import island_rounds


@pytest.fixture
def islands_file(tmp_path: Path) -> Path:
    file = tmp_path / "islands.yaml"
    file.write_text(yaml.safe_dump({**SPEC, "islands": {"num": 3, "every_steps": 10}}))
    return file


def test_submit_makes_a_job_for_each_island_and_says_how_to_go_on(shoal: Any, islands_file: Path) -> None:
    made = shoal("submit", str(islands_file))
    assert made.code == 0, made.err
    ids = [line.split()[0] for line in made.out.splitlines() if line.startswith("job-")]
    assert len(ids) == 3
    assert f"shoal rounds {ids[0]}" in made.out and "shoal sweep" in made.out
    specs = [shoal("show", job_id, "--json").json()["spec"]["islands"] for job_id in ids]
    assert [(one["index"], one["run"], one["every_steps"]) for one in specs] == [(n, ids[0], 10) for n in range(3)]


def test_the_commands_that_submit_names_exist(shoal: Any, islands_file: Path) -> None:
    lines = shoal("submit", str(islands_file)).out.splitlines()
    commands = [line.split()[1:] for line in lines if line.startswith("shoal ")]
    assert len(commands) == 2
    for command in commands:
        ran = shoal(*command, *(["--yes"] if "stop" in command or "cancel" in command else []))
        assert ran.code == 0, (command, ran.err)


def test_json_has_the_sweep_and_the_jobs(shoal: Any, islands_file: Path) -> None:
    made = shoal("submit", str(islands_file), "--json").json()
    assert len(made["jobs"]) == 3
    assert shoal("sweep", "show", made["sweep"], "--json").json()


def test_following_several_jobs_is_refused(shoal: Any, islands_file: Path) -> None:
    refused = shoal("submit", str(islands_file), "--follow")
    assert refused.code == 2 and "--follow" in refused.err
    assert shoal("jobs", "--json").json() == []


def test_one_island_of_a_spec_is_a_plain_job(shoal: Any, islands_file: Path) -> None:
    made = shoal("submit", str(islands_file), "--set", "islands.index=0", "--json").json()
    assert made["spec"]["islands"]["run"] == made["id"]


def test_rounds_shows_what_has_arrived_and_what_is_closed(shoal: Any, service: Any, islands_file: Path) -> None:
    first, second, _ = shoal("submit", str(islands_file), "--json").json()["jobs"]
    assert "no rounds yet" in shoal("rounds", second).out
    kit.close(service.store, service.epoch, first, 0, [0, 1])
    note = service.store.writing(island_rounds.note, service.epoch)
    note(first, 1, [kit.contribution(2, step=20, waited_s=2.5)], now=20.0)
    lines = [line.split() for line in shoal("rounds", second).out.splitlines()]
    assert lines[0][:6] == ["round", "closed", "members", "mean", "loss", "island"]
    assert lines[0][6:] == ["step", "tokens", "loss", "size", "waited"]
    assert lines[1][:8] == ["1", "open", "-", "-", "2", "20", "100", "2.5000"]
    assert lines[2][0] == "0" and lines[2][-10:-4] == ["2", "2.5000", "0", "50", "100", "2.5000"] and lines[3][0] == "1"
    rounds = shoal("rounds", second, "--json").json()
    assert [(one["round"], len(one["arrived"])) for one in rounds] == [(1, 1), (0, 2)]
