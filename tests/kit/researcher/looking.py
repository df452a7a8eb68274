"""Tasks that only look: jobs are found and compared, and pages are read."""

from datetime import datetime, timedelta

from selenium.webdriver.common.keys import Keys

from kit.researcher.person import Person, Task, task
from kit.worlds.team_history import DIVERGED_AT, STRAGGLER
from kit.worlds.written_service import Service

LOOKING: list[Task] = []


@task("Find the job of the last week with the lowest loss among lr > 1e-3, open its checkpoint's parent", LOOKING)
def parent_of_the_best(person: Person, service: Service) -> None:
    person.fill("Where", "created > now - 7d and lr > 1e-3")
    person.sees_rows("short-tail", "long-tail")
    person.click("Loss")
    person.sees_rows("long-tail", "short-tail")
    person.click("long-tail")
    person.click_at("#facts a")
    person.sees("base", "#title")
    person.sees("SUCCEEDED", "#title")


@task("List the jobs with a label that train now", LOOKING)
def training_with_label(person: Person, service: Service) -> None:
    person.click("More")
    person.fill("Label", "team=speech")
    person.choose("State", "RUNNING")
    person.sees_rows("struck")


@task("List the jobs that have failed since yesterday", LOOKING)
def failed_since_yesterday(person: Person, service: Service) -> None:
    person.fill("Where", 'state == "FAILED" and ended > now - 1d')
    person.sees_rows("broken")


@task("Open a job of which a part of the name is known", LOOKING)
def search_by_name(person: Person, service: Service) -> None:
    person.search("small-r")
    person.sees("small-rate", "#title")


@task("Order the table by a setting that is no column yet", LOOKING)
def order_by_a_setting(person: Person, service: Service) -> None:
    person.click("More")
    person.fill("Project", "speech")
    person.click("Columns")
    person.fill("Search columns", "optimizer.lr")
    person.click("optimizer.lr")
    person.click("optimizer.lr", "#heads")
    person.sees("0.0001", "#jobs tr:first-child")


@task("See in which settings two jobs differ", LOOKING)
def compare_two_jobs(person: Person, service: Service) -> None:
    person.fill("Search jobs", "-tail")
    person.sees_rows("short-tail", "long-tail")
    person.click("Select short-tail")
    person.click("Select long-tail")
    person.click("Compare 2")
    person.sees("optimizer.lr", "#specs")
    person.sees("0.003", "#specs")
    person.sees("continue_from", "#specs")


@task("Lay a metric of ten jobs over each other, as mean and band of two groups", LOOKING)
def overlay_by_group(person: Person, service: Service) -> None:
    person.click("Workspace")
    person.fill("Where", 'label.study == "warmup"')
    person.fill("Group by", "label.arm")
    person.fill("of", "metric.accuracy")
    person.press(Keys.ENTER)
    person.sees("2 of 2 groups shown")
    person.sees("label.arm: long (5)", "#runs")
    person.sees_picture("metric.accuracy over step: 2 ")


@task("Keep such a view under a name, and get a link that others open", LOOKING)
def share_a_view(person: Person, service: Service) -> None:
    person.click("Workspace")
    person.fill("Where", 'label.study == "warmup"')
    person.sees("10 of 10 jobs shown")
    person.click("Save view")
    person.fill("Name", "warmups")
    person.click("Save")
    person.waits_until_closed()
    address = person.browser.run("location.href")
    assert address.endswith("/workspace?view=default%2Fwarmups")
    person.browser.driver.switch_to.new_window("tab")
    try:
        person.browser.open(address)
        person.sees("warmups", "#title")
        person.sees("10 of 10 jobs shown")
    finally:
        person.browser.driver.close()
        person.browser.driver.switch_to.window(person.browser.driver.window_handles[0])


@task("Read why a job has failed", LOOKING)
def why_it_failed(person: Person, service: Service) -> None:
    person.choose("State", "FAILED")
    person.click("broken")
    person.sees("KeyError: 'labels'", "#message")
    person.sees("step 17", "#failure")


@task("Read why a job waits, and open the one that holds what it waits for", LOOKING)
def why_it_waits(person: Person, service: Service) -> None:
    person.click("waits")
    person.sees("Needs 2 workers; urgent holds them", "#message")
    person.sees("Position in the queue", "#vital")
    person.sees("urgent", "#vital a")
    person.click_at("#vital a")
    person.sees("urgent", "#title")


@task("Read what a killed worker has cost", LOOKING)
def what_a_kill_cost(person: Person, service: Service) -> None:
    person.fill("Where", "incidents > 0")
    person.sees_rows("struck")
    person.click("struck")
    person.sees("worker died", "#incidents")
    person.sees("1.5 s", "#incidents")
    person.sees("3 steps lost", "#facts")


@task("Find the rank that the others wait for", LOOKING)
def which_rank_is_slow(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("System")
    person.sees(f"Highest: rank {STRAGGLER}", "#system-said")


@task("See on which node a rank runs", LOOKING)
def where_a_rank_runs(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Workers")
    person.sees("127.0.0.1", "#grid")


@task("Find the line of the log at a time, and get a link to it", LOOKING)
def line_at_a_time(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Logs")
    person.sees("batch 599 is done", "#lines")
    with service.client as client:
        [job] = [one for one in client.jobs() if one.name == "struck"]
        line = next(one for one in client.logs(job.id) if one.text == "batch 420 is done")
    person.fill_time("from", datetime.fromtimestamp(line.at) + timedelta(seconds=0.5))
    person.sees("batch 42", "#lines div:first-child")
    person.click_at("#lines a")
    person.browser.until(lambda: "line=" in person.browser.run("location.hash"), "the link")
    person.sees("batch 42", "#lines .chosen")


@task("Download the errors of a log", LOOKING)
def download_errors(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Logs")
    person.choose("level", "errors")
    person.click("Download")
    person.sees("3 lines saved", "#log-said")
    person.browser.until(lambda: list(person.downloads.glob("*.log")), "the file")
    assert "ERROR: batch 350 was skipped" in next(person.downloads.glob("*.log")).read_text()


@task("Look at the images of a step", LOOKING)
def images_of_a_step(person: Person, service: Service) -> None:
    person.search("struck")
    person.click("Media")
    person.sees("step 30", "#media-at")
    person.click("step", "#media-card")
    person.sees("step 20", "#media-at")
    person.sees_picture("sample at step 20")


@task("See which jobs a checkpoint comes from, and that serving reads it as `prod`", LOOKING)
def lineage_and_prod(person: Person, service: Service) -> None:
    person.search("long-tail")
    person.click("Checkpoints")
    person.sees("base", "#lineage")
    person.sees("step 100 of", "#lineage")
    person.sees("transcriber@2 (prod) is step 200", "#registered")


@task("Read which trial of a sweep is the best so far", LOOKING)
def best_trial(person: Person, service: Service) -> None:
    person.click("Sweeps")
    person.sees("try-2", "#sweeps")


@task("Save a table of chosen columns for a spreadsheet", LOOKING)
def export_a_table(person: Person, service: Service) -> None:
    person.fill("Where", 'label.study == "warmup"')
    person.click("Columns")
    person.fill("Search columns", "metric.accuracy")
    person.click("metric.accuracy")
    person.sees("metric.accuracy", "#heads")
    person.click("Export CSV")
    person.browser.until((person.downloads / "jobs.csv").exists, "the file")
    rows = (person.downloads / "jobs.csv").read_text().splitlines()
    assert rows[0] == "id,name,state,metric.accuracy" and len(rows) == 11, rows


@task("Read who has taken the workers of a job, and why", LOOKING)
def who_took_workers(person: Person, service: Service) -> None:
    person.click("Fleet")
    person.sees("Priority 5 before 0.", "#decisions")
    person.sees("urgent", "#decisions")
    person.sees("urgent", "#queue td:last-child a")


@task("Read the goodput of a project, and where the rest went", LOOKING)
def goodput_of_a_project(person: Person, service: Service) -> None:
    person.click("Fleet")
    person.sees("speech", "#spent")
    person.sees("%", "#spent")
    person.sees_picture("Worker time of speech by cause")


@task("See the keys that the pages know", LOOKING)
def keys(person: Person, service: Service) -> None:
    person.browser.until(lambda: person.browser.count("#site-search"), "the page")
    person.press("?")
    person.sees("search everything", "dialog[open]")


@task("Find which job has diverged, and at which step", LOOKING)
def which_diverged(person: Person, service: Service) -> None:
    person.fill("Where", "first(step where loss is nan)")
    person.sees_rows("diverged")
    person.click("Columns")
    person.fill("Search columns", "first(step where loss is nan)")
    person.click("first(step where loss is nan)", "#column-list")
    person.sees(str(DIVERGED_AT), "#jobs tr")


@task("Send exactly this view: the address is enough", LOOKING)
def send_this_view(person: Person, service: Service) -> None:
    person.click("Workspace")
    person.fill("Where", 'label.study == "warmup"')
    person.sees("10 of 10 jobs shown")
    person.click("Show warmup-3")
    person.sees("9 of 10 jobs shown")
    address = person.browser.run("location.href")
    person.browser.driver.switch_to.new_window("tab")
    try:
        person.browser.open(address)
        person.sees("9 of 10 jobs shown")
    finally:
        person.browser.driver.close()
        person.browser.driver.switch_to.window(person.browser.driver.window_handles[0])


@task("Read the last lines of rank 1 of a failed job", LOOKING)
def last_lines_of_a_rank(person: Person, service: Service) -> None:
    person.search("broken")
    person.click("Logs")
    person.fill("rank", "1")
    person.sees("no labels in batch 18", "#lines")
    person.browser.until(lambda: "batch 16" not in person.browser.text("#lines"), "the lines of rank 0 are gone")


@task("Read what a project has used in the last week", LOOKING)
def usage_of_a_project(person: Person, service: Service) -> None:
    person.click("Fleet")
    person.sees("speech", "#spent")
    person.choose("show", "the last week")
    person.browser.until(lambda: "hours=168" in person.browser.run("location.href"), "the week is in the address")


@task("Read since when a job waits", LOOKING)
def since_when_it_waits(person: Person, service: Service) -> None:
    person.click("waits")
    person.sees("Waiting since", "#vital")


@task("Find the best checkpoint by validation, and the command that exports it", LOOKING)
def export_the_best(person: Person, service: Service) -> None:
    person.search("diverged")
    person.click("Checkpoints")
    person.sees("best (2.9)", "#checkpoints")
    person.click("Export the checkpoint of step 40")
    person.sees("Export the checkpoint of step 40", "dialog[open]")


@task("Copy the spec of a job", LOOKING)
def copy_a_spec(person: Person, service: Service) -> None:
    person.search("small-rate")
    person.click("Spec")
    person.click("Copy YAML")
    person.sees("Copied.", "#spec-copied")


@task("List the jobs that were disturbed, with what it has cost", LOOKING)
def which_were_disturbed(person: Person, service: Service) -> None:
    person.fill("Where", "incidents > 0")
    person.click("Columns")
    person.fill("Search columns", "steps_lost")
    person.click("steps_lost")
    person.sees_rows("struck")
    person.sees("3", "#jobs tr")


@task("Have the browser say when a job ends", LOOKING)
def notify_at_the_end(person: Person, service: Service) -> None:
    permission = {"origin": service.url, "permissions": ["notifications"]}
    person.browser.driver.execute_cdp_cmd("Browser.grantPermissions", permission)
    person.click("struck")
    person.click("Notify me")
    person.sees("Keep this page open in a tab.", "#notify-said")


@task("See how much is free now", LOOKING)
def what_is_free(person: Person, service: Service) -> None:
    person.sees("1 of 4 CPUs free", "#cluster")
