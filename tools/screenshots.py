"""Makes the pictures of the pages in docs/images: Chromium, after a real run with two killed workers, one of a job that
took workers from others, a sweep, and islands; and in build/screenshots every page and every tab of a job, at four
widths, in light and dark.

make screenshots        needs chromium and its driver (Debian: apt-get install chromium chromium-driver)

    python tools/screenshots.py [docs | data]

With `docs`, only the pictures of the docs are made, with `data` only those of the data of a job. They have a palette of
256 colours, so each is small.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from kit.processes.chromium import Browser, chromium  # noqa: E402
from kit.processes.server import Server, until  # noqa: E402
from shoal_api.client import Client  # noqa: E402
from shoal_api.http.routes.pages import PAGES  # noqa: E402
from shoal_service.artifact_views import ModelRequest  # noqa: E402
from shoal_service.views import JobView, SweepRequest  # noqa: E402
from shoal_workers.contract.hugging_face import SFT_TASK  # noqa: E402

IMAGES = ROOT / "docs" / "images"
ALL = ROOT / "build" / "screenshots"
STEPS = 300
KILL_AT = (70, 180)
WIDTH = 1360
WIDTHS = (420, 1024, 1400, 2560)
SCHEMES = ("light", "dark")
TALLEST = 4000
DRAWN = {
    "jobs": "document.querySelectorAll('#jobs tr').length",
    "workspace": "document.querySelector('.panel canvas')?.dataset.num > 0",
    "models": "document.querySelectorAll('main tbody tr').length",
    "fleet": "document.querySelectorAll('#timeline tr').length",
    "compare": "document.querySelectorAll('#chart .scatterlayer .trace').length",
    "sweep": "document.querySelectorAll('#curves-chart .scatterlayer .trace').length",
    "job-curves": "document.querySelectorAll('#curves .scatterlayer .trace').length",
    "job-system": "document.querySelectorAll('#system-map .heatmaplayer image').length",
    "islands": "document.querySelectorAll('#islands tr').length",
}
"""What is true of a page that shows its data, by the name of its picture; of other pages, that they change no more."""
SWEEP = "rates"
RATES, BLOCKS = ("1e-4", "1e-3", "4e-3"), (1, 2, 3)


def main() -> None:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise SystemExit("chromium and chromedriver are not installed: no pictures were made.")
    folders = (tempfile.TemporaryDirectory(prefix=f"shoal-{name}-") for name in ("pictures", "data"))
    with next(folders) as folder, next(folders) as data:
        sources = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        server = Server(Path(sys.executable), Path(folder), ["--num-cpus=6"], {"SHOAL_STOP_S": "0", **sources})
        with server.running() as client, chromium(browser, driver) as tab:
            home = f"http://127.0.0.1:{server.port}"
            _take_data(home, client, tab, Path(data))
            if sys.argv[1:] != ["data"]:
                _take(home, client, tab)


def _take(home: str, client: Client, tab: Browser) -> None:
    calm, hit, second = _train(home, client, tab)
    tab.look(width=WIDTH, height=1600)
    tab.open(f"{home}/jobs/{hit.id}#tab=curves")
    tab.until(lambda: tab.count("#incidents tr") >= 2 and tab.count("#curves .scatterlayer .trace") > 5, "the curves")
    _save(tab, "job")

    tab.look(width=WIDTH, height=1000)
    tab.open("about:blank")
    tab.open(f"{home}/jobs/{hit.id}")
    tab.until(lambda: tab.count("#incidents tr") >= 2 and tab.count("#stripe *"), "the incidents")
    _save(tab, "job-head")
    tab.look(width=WIDTH, height=620)
    tab.click("#tab-system")
    tab.until(lambda: tab.count("#system-map .heatmaplayer image"), "the heat map")
    _show(tab, "#system-map")
    _save(tab, "system-map")

    tab.look(width=WIDTH, height=1250)
    tab.open(f"{home}/compare?jobs={calm.id},{hit.id},{second.id}")
    tab.until(lambda: tab.text("#jobs").count("in 300 steps") == 2, "the comparison")
    tab.until(lambda: tab.count("#chart .scatterlayer .trace") > 5, "the curves")
    _save(tab, "compare")

    _take_lists(home, tab)
    island = _take_islands(home, client, tab)
    if sys.argv[1:] == ["docs"]:
        return
    tab.open(f"{home}/jobs/{hit.id}")
    tab.until(lambda: tab.count("[role=tab]"), "the tabs")
    tabs = tab.run("[...document.querySelectorAll('[data-tab]')].map((one) => one.dataset.tab)")
    addresses = {f"job-{name}": f"/jobs/{hit.id}#tab={name}" for name in tabs}
    addresses |= {path.strip("/") or "jobs": path for path in PAGES if path not in ("/compare", "/docs")}
    addresses |= {"compare": f"/compare?jobs={calm.id},{hit.id}", "sweep": f"/sweeps?label=sweep%3D{SWEEP}"}
    addresses["islands"] = f"/jobs/{island}"
    _take_all(home, tab, addresses)


def _train(home: str, client: Client, tab: Browser) -> tuple[JobView, JobView, JobView]:
    """Runs a calm job, the same with two kills, a third one, an urgent one that takes workers of others, and a sweep.
    The table of jobs and the fleet are pictured while some train; all have ended when it returns."""
    calm = client.submit(_spec("calm", lr=4e-3))
    client.wait(calm.id, timeout_s=600)
    hit = client.submit(_spec("struck", lr=4e-3))
    for step in KILL_AT:
        until(lambda step=step: client.job(hit.id).status.step >= step, f"step {step}", 600)
        pids = [worker.pid for worker in client.workers(hit.id) if worker.rank is not None]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)
    second = client.submit(_spec("fast-lr", lr=1.2e-2))
    until(lambda: client.job(second.id).status.step >= STEPS * 0.1, "a tenth of the job", 600)
    urgent = client.submit({**_spec("urgent", lr=4e-3), "priority": 10, "project": "speech", "stop": {"steps": 60}})
    until(lambda: client.job(hit.id).status.step >= STEPS * 0.9, "most of the job", 600)

    tab.look(width=WIDTH, height=760)
    tab.log_in(f"{home}{client.session_link().path}")
    tab.open(f"{home}/")
    tab.until(lambda: "urgent" in tab.text("#jobs"), "the urgent job")
    _save(tab, "fleet-page")
    until(lambda: client.job(urgent.id).status.step > 0, "the first step of the urgent job", 600)
    tab.look(width=WIDTH, height=1000)
    tab.open(f"{home}/fleet")
    tab.until(lambda: "urgent" in tab.text("#timeline") and tab.count("#decisions tr"), "the decisions")
    _show(tab, "#timeline")
    _save(tab, "fleet-timeline")

    for job in (hit, urgent, second):
        client.wait(job.id, timeout_s=600)
    spec = {**_spec("rates", lr=4e-3), "stop": {"steps": 60}, "elasticity": {"min_workers": 1, "max_workers": 1}}
    del spec["labels"]
    grid = {"optimizer.lr": RATES, "model.num_layers": BLOCKS}
    sweep = client.submit_sweep(SweepRequest(name=SWEEP, spec=spec, grid=grid, limit=5))
    for trial in sweep.jobs:
        client.wait(trial.id, timeout_s=600)
    for number, job in enumerate((calm, hit), start=1):
        client.register_model("words", ModelRequest(job=job.id))
        client.set_model_alias("default", "words", ("canary", "prod")[number - 1], number)
    return calm, hit, second


def _take_data(home: str, client: Client, tab: Browser, folder: Path) -> None:
    """What `shoal data show` prints about a job of fine-tuning, and the tab of the job with the same."""
    lines = [{"prompt": f"What is {a} x {b}? ", "completion": f"It is {a * b}."} for a in range(2, 9) for b in range(9)]
    lines += [{"prompt": "Is there an answer?", "completion": ""}, {"prompt": "Why? " * 60, "completion": "Because."}]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    spec = {
        "name": "answers",
        "task": SFT_TASK,
        "model": {"config": {**config, "num_attention_heads": 2, "vocab_size": 257}, "seq_len": 128},
        "data": {"paths": [str(folder / "answers.jsonl")], "cache_dir": str(folder / "cache")},
        "batch": {"global_size": 8, "micro_size": 4},
        "stop": {"steps": 2},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "shoal_api.cli.main", "data", "show", str(folder / "job.yaml"), "--samples", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = (
        f"<pre style='font: 15px monospace; margin: 16px'>$ shoal data show job.yaml --samples 3\n{escape(shown)}</pre>"
    )
    tab.look(width=WIDTH // 2 + 300, height=40 + 18 * (2 + shown.count("\n")))
    tab.open(f"data:text/html;charset=utf-8,{quote(page)}")
    _save(tab, "data-show")

    job = client.submit(spec)
    client.wait(job.id, timeout_s=600)
    tab.look(width=WIDTH, height=900)
    tab.log_in(f"{home}{client.session_link().path}")
    tab.open(f"{home}/jobs/{job.id}#tab=data")
    tab.until(lambda: tab.count("#data-preview mark"), "the data")
    _show(tab, "#data-preview")
    _save(tab, "data-tab")


def _take_lists(home: str, tab: Browser) -> None:
    """The pages of many jobs."""
    of_sweep = f'sweep.name == "{SWEEP}"'
    tab.look(width=WIDTH, height=600)
    columns = "optimizer.lr,model.num_layers,loss,val_loss,tokens_per_s,goodput"
    asked = {"where": f"{of_sweep} and lr > 1e-4", "columns": columns, "sort": "val_loss"}
    tab.open(f"{home}/?{urlencode(asked)}")
    tab.until(lambda: tab.count("#jobs tr") == len(BLOCKS) * (len(RATES) - 1), "the jobs that match")
    _show(tab, "#where")
    _save(tab, "runs-table")

    tab.look(width=WIDTH, height=900)
    tab.open(f"{home}/workspace?{urlencode({'where': of_sweep})}")
    tab.until(lambda: "9 of 9 jobs shown" in tab.text("#num-runs"), "the jobs of the sweep")
    tab.fill("#group", "optimizer.lr")
    tab.press("\ue004")  # Tab
    tab.until(lambda: "3 of 3 groups shown" in tab.text("#num-runs"), "the groups")
    tab.until(lambda: tab.run("document.querySelector('.panel canvas')?.dataset.num") == "3", "their curves")
    _save(tab, "workspace")

    tab.look(width=WIDTH, height=1250)
    tab.open(f"{home}/sweeps?label=sweep%3D{SWEEP}")
    tab.until(lambda: tab.count("#curves-chart .scatterlayer .trace") and tab.count("#best-chart .trace"), "the charts")
    _save(tab, "sweep")


def _take_islands(home: str, client: Client, tab: Browser) -> str:
    """Pictures the card of islands while they wait for a stopped one.

    Returns:
        the id of the job of the stopped island.
    """
    spec = {
        **_spec("atoll", lr=4e-3),
        "islands": {"num": 3, "every_steps": 20, "compress": "bf16", "grace_s": 120.0},
        "stop": {"steps": 160},
        "elasticity": {"min_workers": 1, "max_workers": 1},
    }
    del spec["labels"]
    *others, last = client.submit_sweep(SweepRequest(spec=spec, grid={"islands.index": (0, 1, 2)})).jobs
    until(lambda: client.job(last.id).status.step >= 70, "three rounds of the islands", 600)
    [pid] = [worker.pid for worker in client.workers(last.id) if worker.rank is not None]
    os.kill(pid, signal.SIGSTOP)
    tab.look(width=1400, height=250)
    tab.open(f"{home}/jobs/{last.id}")
    tab.until(lambda: tab.text("#open-round").endswith("for island 2."), "the wait for island 2")
    _show(tab, "#islands")
    _save(tab, "islands")
    os.kill(pid, signal.SIGCONT)
    for job in (*others, last):
        client.wait(job.id, timeout_s=600)
    return last.id


def _show(tab: Browser, selector: str) -> None:
    """Scrolls to the top of the card that this is in."""
    tab.run(f"(document.querySelector('{selector}').closest('.card').scrollIntoView(), scrollBy(0, -16))")


def _hide_bars(tab: Browser) -> None:
    """Without a pointer, as here, Plotly shows its buttons all the time, over the charts."""
    tab.run("[...document.querySelectorAll('.modebar')].map((one) => (one.style.display = 'none'))")


def _save(tab: Browser, name: str) -> None:
    _hide_bars(tab)
    file = IMAGES / f"{name}.png"
    tab.driver.save_screenshot(str(file))
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(file, optimize=True)


def _take_all(home: str, tab: Browser, addresses: dict[str, str]) -> None:
    ALL.mkdir(parents=True, exist_ok=True)
    for name, address in addresses.items():
        for scheme in SCHEMES:
            for width in WIDTHS:
                tab.look(width=width, scheme=scheme)
                tab.open("about:blank")
                tab.open(home + address)
                _wait(tab, address, DRAWN.get(name, "true"))
                height = min(TALLEST, tab.run("document.documentElement.scrollHeight"))
                tab.look(width=width, height=height, scheme=scheme)
                _hide_bars(tab)
                tab.driver.save_screenshot(str(ALL / f"{name}-{width}-{scheme}.png"))


def _wait(tab: Browser, address: str, drawn: str) -> None:
    tab.until(lambda: tab.run("document.readyState") == "complete" and tab.count("main .card"), address)
    tab.until(lambda: tab.text("#live") != "connecting", f"the data of {address}")
    tab.until(lambda: tab.run(f"!!({drawn})") and _rests(tab), f"the parts of {address}")


def _rests(tab: Browser) -> bool:
    """Two frames apart the page is the same."""
    size = "document.querySelector('main').innerHTML.length"
    before = tab.run(size)
    frames = "requestAnimationFrame(() => requestAnimationFrame(() => arguments[arguments.length - 1]()))"
    tab.driver.execute_async_script(frames)
    return bool(tab.run(size) == before)


def _spec(name: str, *, lr: float) -> dict[str, Any]:
    return {
        "name": name,
        "labels": {"sweep": "lr", "lr": f"{lr:g}"},
        "model": {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "seq_len": 64},
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": 12, "micro_size": 2},
        "optimizer": {"lr": lr},
        "stop": {"steps": STEPS},
        "elasticity": {"min_workers": 2, "max_workers": 3},
        "checkpoint": {"every_steps": 50},
        "validation": {"every_steps": 50, "samples": 32},
        "health": {"hang_floor_s": 60.0},  # other programs on this machine must not look like a hang
    }


if __name__ == "__main__":
    main()
