"""`shoal sweep`: the jobs of a grid, what they carry, and the commands for all of them."""

import json
from pathlib import Path
from typing import Any

from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState

GRID = ("--grid", "optimizer.lr=1e-4,3e-4", "--grid", "seed=1,2")


def test_each_combination_is_a_job_that_carries_the_rules_of_its_sweep(
    shoal: Any, service: Any, spec_file: Path
) -> None:
    options = ("--limit", "2", "--prune", "median", "--warmup", "30", "--json")
    made = shoal("sweep", str(spec_file), "rates", *GRID, *options).json()
    specs = [service.store.get_job(job_id).spec for job_id in made["jobs"]]
    assert [(spec.optimizer.lr, spec.seed) for spec in specs] == [(1e-4, 1), (1e-4, 2), (3e-4, 1), (3e-4, 2)]
    assert [spec.name for spec in specs] == [f"byte-lm-{n}" for n in (1, 2, 3, 4)]
    assert specs[2].labels == {"sweep": "rates", "lr": "3e-4", "seed": "1"}
    sweeps = {(spec.sweep.name, spec.sweep.limit, spec.sweep.prune, spec.sweep.warmup_steps) for spec in specs}
    assert sweeps == {("rates", 2, "median", 30)}
    assert len({spec.elasticity.max_workers for spec in specs}) == 1
    again = shoal("sweep", str(spec_file), "rates", *GRID, *options).json()
    assert again == made, "the same command submits nothing twice"


def test_a_sweep_without_a_name_gets_one_and_words_how_to_go_on(shoal: Any, spec_file: Path) -> None:
    text = shoal("sweep", str(spec_file), *GRID).out
    assert text.count("job-") == 4 and "lr=3e-4 seed=2" in text and "shoal sweep show byte-lm-" in text


def test_a_dry_run_checks_every_job_and_submits_none(shoal: Any, spec_file: Path) -> None:
    ran = shoal("sweep", str(spec_file), *GRID, "--dry-run")
    assert ran.code == 0 and "lr=1e-4 seed=2" in ran.out and "4 jobs; nothing was submitted" in ran.out
    wrong = shoal("sweep", str(spec_file), "--grid", "batch.micro_size=4,5", "--dry-run")
    assert wrong.code == 2 and "micro_size 5" in wrong.err
    assert shoal("jobs", "--json").json() == []


def test_the_name_of_another_sweep_is_refused_and_more_values_continue_one(
    shoal: Any, service: Any, spec_file: Path
) -> None:
    first = shoal("sweep", str(spec_file), "rates", "--grid", "seed=1,2", "--json").json()["jobs"]
    other = shoal("sweep", str(spec_file), "rates", "--grid", "seed=3,4")
    assert other.code == 2 and f"another job number 1 ({first[0]})" in other.err
    more = shoal("sweep", str(spec_file), "rates", "--grid", "seed=1,2,3", "--json").json()["jobs"]
    assert (more[:2], len(more)) == (first, 3)


def test_a_sweep_of_two_projects_is_shown_by_its_project(shoal: Any, service: Any, spec_file: Path) -> None:
    for project in ("one", "two"):
        ran = shoal("sweep", "start", str(spec_file), "rates", "--grid", "seed=1,2", "--project", project)
        assert ran.code == 0, ran.err
    both = shoal("sweep", "show", "rates")
    assert both.code == 2 and "the projects one, two have a sweep 'rates'" in both.err
    assert len(shoal("sweep", "show", "rates", "--project", "two", "--json").json()) == 2
    refused = shoal("sweep", "show", "rates", "--project", "two", "--grid", "seed=3")
    assert refused.code == 2 and "sweep show cannot be combined with --grid" in refused.err
    assert shoal("sweep", "cancel", "rates", "--project", "one", "-y").out.startswith("cancelled 2 of 2 jobs")
    assert shoal("sweep", "cancel", "rates", "--project", "one").out.startswith("cancelled 0 of 2 jobs")
    states = {job["state"] for job in shoal("sweep", "show", "rates", "--project", "two", "--json").json()}
    assert states == {"QUEUED"}


def test_show_lists_the_best_first_and_cancel_ends_what_goes_on(shoal: Any, service: Any, spec_file: Path) -> None:
    made = shoal("sweep", str(spec_file), "rates", *GRID, "--json").json()["jobs"]
    first, second = (service.store.get_job(job_id) for job_id in made[:2])
    for job, loss in ((first, 2.5), (second, 1.5)):
        service.begin(job)
        service.report(job, JobStatus(state=JobState.RUNNING, attempt=1, step=5, loss=9.0, val_loss=loss))
    shown = shoal("sweep", "show", "rates", "--json").json()
    assert [job["id"] for job in shown[:2]] == [second.id, first.id]
    text = shoal("sweep", "show", "rates").out
    assert "lr" in text and "3e-4" in text and "RUNNING" in text
    ended = shoal("sweep", "cancel", "rates", "--json").json()
    assert sorted(ended["cancelled"]) == sorted(made)
    states = {service.store.get_job(job_id).status.state for job_id in made}
    assert states == {JobState.CANCELLING, JobState.CANCELLED}
    assert shoal("sweep", "show", "nothing").code == 4
    assert "sweep show needs the name of a sweep" in shoal("sweep", "show").err


def test_the_label_of_a_sweep_cannot_be_another_one(shoal: Any, spec_file: Path) -> None:
    spec = json.loads(spec_file.read_text()) | {"sweep": {"name": "a"}, "labels": {"sweep": "b"}}
    refused = shoal("submit", "-", stdin=json.dumps(spec))
    assert refused.code == 2 and "labels.sweep is 'b', and sweep.name is 'a'" in refused.err


def test_start_draws_values_and_stop_ends_the_jobs(shoal: Any, service: Any, spec_file: Path) -> None:
    values = ("--range", "optimizer.lr=1e-5:1e-2:log", "--range", "stop.steps=20:90", "--grid", "seed=1,2")
    rules = ("--samples", "4", "--seed", "9", "--prune", "halving", "--reduction", "2", "--warmup", "5")
    tried = shoal("sweep", "start", str(spec_file), "drawn", *values, *rules, "--dry-run")
    assert tried.code == 0 and tried.out.count("lr=") == 4 and "nothing was submitted" in tried.out
    ran = shoal("sweep", "start", str(spec_file), "drawn", *values, *rules)
    assert ran.code == 0 and "shoal sweep stop drawn" in ran.out
    assert {line.strip() for line in tried.out.splitlines() if "lr=" in line} == {
        line.split("  ")[-1] for line in ran.out.splitlines() if "lr=" in line
    }
    made = shoal("sweep", "show", "drawn", "--json").json()
    specs = [service.store.get_job(job["id"]).spec for job in made]
    assert {(one.sweep.prune, one.sweep.reduction, one.sweep.warmup_steps) for one in specs} == {("halving", 2, 5)}
    assert len({one.optimizer.lr for one in specs}) == 4 and all(20 <= one.stop.steps <= 90 for one in specs)
    assert shoal("sweep", "stop", "drawn", "more").code == 2
    assert shoal("sweep", "stop", "drawn").out.startswith("cancelled 4 of 4 jobs")
