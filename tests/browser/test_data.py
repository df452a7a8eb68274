"""The tab Data: of a job, and of a spec before it is submitted."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kit.processes.axe import violations
from kit.processes.chromium import CUT_OFF, Browser
from kit.processes.server import PATIENCE_S, Server
from kit.worlds.team_history import png
from kit.worlds.written_service import Service
from shoal_api.client import Client
from shoal_workers.contract.data_preview import DATA_FILE, DataPreview, SamplePreview, SplitPreview, TextPreview
from shoal_workers.contract.job import JobState
from shoal_workers.contract.media import FOLDER

EVIL = "<img src=/evil onerror=evil()><script>evil()</script>"
EVILS = "document.querySelectorAll('img[src=\"/evil\"], #data-preview script').length"
MARKED = "[...document.querySelectorAll('#data-preview mark')].map((one) => one.textContent)"


def _preview() -> DataPreview:
    """What a job of a text task would store, with texts as anybody may write them; and an image."""
    answer = (("def f(x):\n    ", False), ("    return x<|im_end|>", True), (EVIL, False))
    train = SplitPreview(
        samples=12_345,
        validated=None,
        left_out={f"lines without an answer {EVIL}": 17},
        num_cut=3,
        num_labels=60,
        labels={EVIL: 0.75, "dog": 0.25},
        num_counted=200,
        tokens=(4, 20, 512),
        in_loss=(1, 7, 300),
        num_few=2,
        rows=(
            SamplePreview(
                texts=(
                    TextPreview(title="chosen", spans=answer, in_loss=7, left_out_chars=1_234),
                    TextPreview(title=EVIL, spans=(("word" * 200, True),), in_loss=1),
                ),
                tokens=20,
                in_loss=8,
            ),
            SamplePreview(
                texts=(TextPreview(title="pixels", spans=(("3 x 32 x 48", False),), in_loss=0),),
                tokens=0,
                in_loss=0,
                label="dog",
                drawn="@@@",
                png=base64.b64encode(png(48, 32, (40, 120, 160))).decode(),
            ),
        ),
    )
    validation = train.model_copy(update={"samples": 900, "validated": 64, "rows": train.rows[:1]})
    return DataPreview(task="a:B", remarks=(f"2 train {EVIL}",), splits={"train": train, "validation": validation})


@pytest.fixture
def folder(written: Service, tmp_path: Path) -> tuple[str, Path]:
    """A job that trains, and the folder of its media."""
    job = written.add_job(name="reads")
    written.train(job)
    folder = tmp_path / "checkpoints" / job.id / FOLDER
    folder.mkdir(parents=True)
    return f"{written.url}/jobs/{job.id}#tab=data", folder


def test_a_job_shows_what_it_reads_as_text_whatever_is_in_it(reader: Browser, folder: tuple[str, Path]) -> None:
    page, place = folder
    (place / DATA_FILE).write_text(_preview().model_dump_json())
    reader.look(width=1400)
    reader.open(page)
    reader.sees("#data-preview", "12,345")
    assert reader.run(MARKED)[:2] == ["    return x<|im_end|>", "word" * 200]
    shown = reader.text("#data-preview")
    for text in (
        "4 to 512, median 20",
        f"lines without an answer {EVIL}: 17",
        f"2 train {EVIL}",
        "75 %",
        "and 58 rarer labels",
        "… 1,234 more characters",
        "Sample 2, label dog",
        "Read in each validation",
    ):
        assert text in shown, text
    assert reader.run(EVILS) == 0
    assert reader.run("document.querySelector('#data-preview img').naturalWidth") == 48
    wrong = []
    for scheme, width in (("light", 1400), ("light", 420), ("dark", 420), ("dark", 1400)):
        reader.look(width=width, scheme=scheme)
        wrong += violations(reader) + reader.run(CUT_OFF)
    assert wrong == []
    assert reader.complaints() == []


def test_a_spec_shows_what_it_would_read_before_it_is_submitted(
    browser: Browser, shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{EVIL} to be or not to be, that is the question.\n" * 40)
    data = {"paths": [str(lines)], "cache_dir": str(tmp_path / "cache")}
    model = {"dim": 32, "num_layers": 1, "num_heads": 2, "seq_len": 64}
    spec: dict[str, Any] = {"name": "plays", "model": model, "data": data, "stop": {"steps": 1_000_000}}
    browser.open(f"http://127.0.0.1:{shoal_server.port}/")
    browser.click("#new")
    browser.fill("#yaml", json.dumps({**spec, "script": {"file": "train.py"}, "task": "a"}))
    browser.until(lambda: browser.run("document.querySelector('#verdict').className") == "error", "it is refused")
    assert browser.run("document.querySelector('#read-data').disabled")
    browser.fill(
        "#yaml",
        json.dumps({**spec, "schedule": {"warmup_steps": 500}, "elasticity": {"min_workers": 64, "max_workers": 64}}),
    )
    browser.sees("#verdict", "The spec is valid.")
    browser.click("#tab-data")
    browser.until(lambda: not browser.run("document.querySelector('#read-data').disabled"), "the button")
    browser.click("#read-data")
    browser.sees("#data-said", "plays-data has read the data.")
    assert EVIL[1:] in "".join(browser.run(MARKED)) and browser.run(EVILS) == 0
    for scheme, width in (("light", 1400), ("dark", 420)):
        browser.look(width=width, scheme=scheme)
        assert violations(browser, colours_only=scheme == "dark") == []
    [job] = [one for one in client.jobs() if one.name == "plays-data"]
    status = client.wait(job.id, timeout_s=PATIENCE_S).status
    assert status.state in (JobState.CANCELLED, JobState.SUCCEEDED), status
    browser.open(f"http://127.0.0.1:{shoal_server.port}/jobs/{job.id}#tab=data")
    browser.sees("#data-preview", "Validation")
    assert client.data(job.id).splits["train"] is not None
    # The page cancels the job once it has the data; by then it may have ended by itself.
    assert [line for line in browser.complaints() if f"{job.id}/cancel" not in line] == []
