"""The page of the registry: versions, what they come from, and what serving reads after a change."""

from __future__ import annotations

import pytest

from kit.processes.chromium import Browser
from kit.worlds.written_service import Service
from shoal_api.client.errors import ApiError
from shoal_service.artifact_views import ModelRequest
from shoal_service.views import JobView
from shoal_workers.contract.marker import CheckpointName

NAME = str(CheckpointName(10, 1, 1))
LINKS = "[...document.querySelectorAll('#lineage a')].map((one) => one.getAttribute('href'))"
"""Pages that the table of a lineage leads to."""


@pytest.fixture
def jobs(written: Service) -> tuple[JobView, JobView]:
    """A job, and one that goes on from its checkpoint. The checkpoint of each is a version of the model speech."""
    parent = written.add_job(name="pretrained")
    written.train(parent)
    origin = {"job": parent.id, "step": 10, "checkpoint": NAME, "url": f"/tmp/x/{NAME}"}
    child = written.add_job(name="tuned", continue_from=origin)
    written.train(child)
    with written.client as client:
        for job in (parent, child):
            client.register_model("speech", ModelRequest(job=job.id, description="of the test"))
        client.set_model_alias("default", "speech", "prod", 1)
    return parent, child


def _rows(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('#versions tr')].map((one) => one.dataset.version)")


def test_an_alias_is_moved_and_the_page_says_what_serving_reads_from_then_on(
    reader: Browser, written: Service, jobs: tuple[JobView, JobView]
) -> None:
    parent, child = jobs
    reader.open(f"{written.url}/models")
    reader.until(lambda: _rows(reader) == ["speech@2", "speech@1"], "the versions, the newest first")
    row = reader.text('[data-version="speech@1"]')
    assert "prod" in row and "step 10 of pretrained" in row and "2 KiB" in row and "by bootstrap" in row
    reader.click('[data-model="alias-speech-2"]')
    reader.sees("#dialog-words", f"speech@prod is version 1 now, step 10 of job {parent.id}.")
    reader.sees("#dialog-words", f"From then on it is version 2, step 10 of job {child.id}: serving that reads")
    reader.sees("#dialog-words", "loss 4 → 4")
    reader.fill("#dialog-value", "9x")
    reader.sees("#dialog-words", "An alias begins with a letter")
    reader.fill("#dialog-value", "prod")
    reader.sees("#dialog-words", "From then on it is version 2")
    reader.click("#confirm")
    reader.until(lambda: "prod" in reader.text('[data-version="speech@2"]'), "the alias has moved")
    with written.client as client:
        assert client.model("default", "speech", "prod").job_id == child.id
        reader.click('[data-alias="speech@prod"]')
        reader.sees("#dialog-words", "speech@prod names nothing from then on: serving that asks for it is answered")
        reader.click("#confirm")
        reader.until(lambda: reader.count("[data-alias]") == 0, "the alias is gone")
        with pytest.raises(ApiError):
            client.model("default", "speech", "prod")
        reader.click('[data-model="remove-speech-2"]')
        reader.sees("#dialog-words", "its number is not given again")
        reader.click("#confirm")
        reader.until(lambda: _rows(reader) == ["speech@1"], "it is removed")
        client.set_model_alias("default", "speech", "staging", 1)  # of somebody else, while the page is open
        reader.sees('[data-version="speech@1"]', "staging")
    assert reader.complaints() == []


def test_the_lineage_of_a_version_leads_to_the_page_of_each_part(
    reader: Browser, written: Service, jobs: tuple[JobView, JobView]
) -> None:
    parent, child = jobs
    reader.open(f"{written.url}/models")
    reader.until(lambda: reader.count("#versions a"), "the versions")
    reader.click('[data-version="speech@2"] .title a')
    reader.sees("#version-title", "speech@2")
    assert reader.run(LINKS) == [
        *(f"/jobs/{child.id}", f"/jobs/{parent.id}#tab=checkpoints&step=10"),  # the job, and what it begins with
        f"/jobs/{parent.id}",
    ]
    words = reader.text("#lineage")
    assert "tuned" in words and "pretrained" in words and "its seed" in words
    assert words.count("corpus python-stdlib") == 2
    assert "loss" in reader.text("#version-facts") and "shoal model get speech@2" in reader.text("#get-cli")
    reader.driver.find_element("link text", "step 10 of pretrained").click()  # its parent: one click
    reader.sees("#title", "pretrained")
    reader.until(lambda: reader.count('#checkpoints tr.chosen[data-step="10"]') == 1, "the checkpoint is marked")
    reader.open(f"{written.url}/models#project=default&model=speech&version=prod")
    reader.sees("#version-title", "speech@1")
    assert reader.complaints() == []


def test_from_the_page_of_a_job_one_click_leads_to_its_parents_checkpoint(
    reader: Browser, written: Service, jobs: tuple[JobView, JobView]
) -> None:
    parent, child = jobs
    for tab, there in (("overview", "#facts a"), ("checkpoints", f'#lineage a[href*="{parent.id}#tab"]')):
        reader.open("about:blank")
        reader.open(f"{written.url}/jobs/{child.id}#tab={tab}")
        reader.until(lambda there=there: reader.count(there), "the link")
        reader.click(there)
        reader.sees("#title", "pretrained")
        reader.until(lambda: reader.count('#checkpoints tr.chosen[data-step="10"]') == 1, "its checkpoint is marked")
    assert reader.complaints() == []


def test_a_checkpoint_is_registered_on_the_page_of_its_job_and_on_that_of_the_models(
    reader: Browser, written: Service
) -> None:
    job = written.add_job(name="fresh")
    written.train(job)
    reader.open(f"{written.url}/models")
    reader.sees("#none", "No model is registered")
    reader.open(f"{written.url}/jobs/{job.id}#tab=checkpoints")
    reader.until(lambda: reader.count('[data-checkpoint="register-10"]'), "the button")
    reader.click('[data-checkpoint="register-10"]')
    reader.fill("#dialog-value", "speech")
    reader.sees("#dialog-words", "becomes the next version of speech")
    reader.click("#confirm")
    reader.sees("#version-title", "speech@1")
    reader.click("#register")
    reader.driver.find_element("css selector", "#dialog-input input").send_keys(job.id)
    reader.fill("#dialog-value", "text")
    reader.sees("#dialog-words", f"The newest checkpoint of job {job.id} becomes the next version of text")
    reader.click("#confirm")
    reader.sees("#version-title", "text@1")
    assert sorted(_rows(reader)) == ["speech@1", "text@1"]
    assert reader.complaints() == []
