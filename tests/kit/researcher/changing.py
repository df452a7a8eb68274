"""Tasks that change something: jobs one by one and by the dozen, nodes, tokens."""

from kit.researcher.person import Person, Task, task
from kit.worlds.written_service import Service
from shoal_service.views import JobSummary
from shoal_workers.contract.job import JobState

CHANGING: list[Task] = []


def _jobs(service: Service, begin: str, *, archived: bool = False) -> list[JobSummary]:
    """The jobs whose names begin so."""
    with service.client as client:
        return [one for one in client.jobs(archived=archived) if one.name.startswith(begin)]


@task("Run a job again with another lr, and see the difference before", CHANGING)
def run_again(person: Person, service: Service) -> None:
    person.search("long-tail")
    person.click("Run again")
    person.replace("Spec of the new job in YAML", "lr: 0.003", "lr: 0.004")
    person.sees("optimizer.lr: 0.003 \u2192 0.004", "#dialog-words")
    person.click("Submit a new job")
    person.sees("QUEUED", "#title")
    [new] = [one for one in _jobs(service, "long-tail") if one.state is JobState.QUEUED]
    assert service.store.get_job(new.id).spec.optimizer.lr == 0.004


@task("Go on from the checkpoint of a job in a new one", CHANGING)
def continue_in_a_new_job(person: Person, service: Service) -> None:
    person.search("small-rate")
    person.click("Continue in a new job")
    person.sees("A new job is submitted", "#dialog-words")
    person.click("Submit a new job")
    person.sees("QUEUED", "#title")
    person.sees("after step 100", "#facts")


@task("Train a job that has ended for more steps", CHANGING)
def extend(person: Person, service: Service) -> None:
    person.search("small-rate")
    person.click("Extend")
    person.fill("Total steps", "400")
    person.sees("to step 400", "#dialog-words")
    person.click("Extend")
    person.sees("QUEUED", "#title")


@task("Stop the bad half of a sweep", CHANGING)
def stop_the_bad_half(person: Person, service: Service) -> None:
    person.fill("Where", 'sweep.name == "rates" and loss > 2.5')
    person.sees("4 of 4", "#range")
    person.click("Select the jobs of this page")
    person.click("Cancel", "#deeds")
    person.click("Cancel 4")
    person.waits_until_closed()
    assert [one.state for one in _jobs(service, "try-")].count(JobState.CANCELLING) == 4


@task("Cancel all jobs whose loss has run away", CHANGING)
def cancel_runaways(person: Person, service: Service) -> None:
    person.fill("Where", "loss > 10 and step > 1000")
    person.sees("3 of 3", "#range")
    person.click("Select the jobs of this page")
    person.click("Cancel", "#deeds")
    person.click("Cancel 3")
    person.waits_until_closed()
    assert {one.state for one in _jobs(service, "runaway")} == {JobState.CANCELLING}


@task("Archive what has ended more than 30 days ago", CHANGING)
def archive_old_ones(person: Person, service: Service) -> None:
    person.fill("Where", "ended < now - 30d")
    person.sees("4 of 4", "#range")
    person.click("Select the jobs of this page")
    person.click("Archive", "#deeds")
    person.click("Archive 4")
    person.sees("No job matches.", "#none")
    assert _jobs(service, "draft") == [] and len(_jobs(service, "draft", archived=True)) == 4


@task("Give all jobs of a study a label", CHANGING)
def label_many(person: Person, service: Service) -> None:
    person.fill("Where", 'label.study == "warmup"')
    person.sees("10 of 10", "#range")
    person.click("Select the jobs of this page")
    person.click("Label", "#deeds")
    person.fill("Labels", "paper=2026")
    person.click("Label 10")
    person.waits_until_closed()
    person.sees("paper=2026", "#jobs")
    specs = [service.store.get_job(one.id).spec for one in _jobs(service, "warmup")]
    assert [one.labels["paper"] for one in specs] == ["2026"] * 10


@task("Write down what a job has shown", CHANGING)
def write_notes(person: Person, service: Service) -> None:
    person.search("old-best")
    person.click("Edit notes")
    person.fill("Notes", "# Result\nThe rate was **too large** at the end.")
    person.click("Save")
    person.sees("too large", "#notes strong")


@task("Keep a checkpoint for ever", CHANGING)
def pin_a_checkpoint(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Checkpoints")
    person.click("Pin the checkpoint of step 20")
    person.click("Pin")
    person.sees("committed, pinned", "#checkpoints")


@task("Pause a job that trains", CHANGING)
def pause(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Pause")
    person.sees("No step is lost.", "#dialog-words")
    person.click("Pause")
    person.sees("PAUSING", "#title")


@task("Start a sweep of six jobs, two at a time", CHANGING)
def start_a_sweep(person: Person, service: Service) -> None:
    person.click("Sweeps")
    person.click("Start a sweep")
    person.fill("What they try", "optimizer.lr: 1e-4, 3e-4, 1e-3\nseed: 1, 2")
    person.sees("6 jobs.", "#verdict")
    person.fill("Max concurrent", "2")
    person.click("Start")
    person.sees("Max concurrent\n2", "#rules")


@task("Cordon a node", CHANGING)
def cordon(person: Person, service: Service) -> None:
    person.click("Fleet")
    person.click("Cordon 127.0.0.1")
    person.click("Cordon")
    person.sees("cordoned", "#nodes")


@task("Make a token for a program", CHANGING)
def make_a_token(person: Person, service: Service) -> None:
    person.click("Account")
    person.fill("Name", "nightly")
    person.click("Make a token")
    person.sees("shoal_", "#secret")
    person.sees("nightly", "#tokens")


@task("Revoke a token", CHANGING)
def revoke_a_token(person: Person, service: Service) -> None:
    person.click("Account")
    person.click("Revoke the token lost-laptop")
    person.click("Revoke")
    person.waits_until_closed()
    person.browser.until(lambda: "lost-laptop" not in person.browser.text("#tokens"), "it is revoked")


@task("Stop a whole sweep", CHANGING)
def stop_a_sweep(person: Person, service: Service) -> None:
    person.click("Sweeps")
    person.click("rates")
    person.click("Stop sweep")
    person.sees("12 jobs of 12 end.", "#dialog-words")
    person.click("Stop sweep")
    person.waits_until_closed()
    assert [one.state for one in _jobs(service, "try-")].count(JobState.CANCELLING) == 12


@task("Delete all jobs that have failed", CHANGING)
def delete_the_failed(person: Person, service: Service) -> None:
    person.choose("State", "FAILED")
    person.sees_rows("broken")
    person.click("Select the jobs of this page")
    person.click("Delete", "#deeds")
    person.click("Delete 1")
    person.sees("No job matches.", "#none")
    assert _jobs(service, "broken") == []


@task("Give a job another name", CHANGING)
def rename(person: Person, service: Service) -> None:
    person.search("old-best")
    person.click("Rename")
    person.fill("New name", "best-of-may")
    person.click("Rename")
    person.sees("best-of-may", "#title")
    assert len(_jobs(service, "best-of-may")) == 1


@task("Be told when a metric crosses a bound", CHANGING)
def set_an_alert(person: Person, service: Service) -> None:
    person.click("struck")
    person.click("Alerts")
    person.fill("Conditions, one a line: loss > 10", "loss > 10")
    person.click("Set alerts")
    person.sees("Alert loss > 10", "#facts")
