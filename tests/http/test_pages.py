"""The HTML pages: self-contained, loaded from this host only, and safe against text from a job's author."""

import json
import re
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.requirements import require
from shoal_api.http import page_files
from shoal_api.http.page_files import LIBRARIES
from shoal_api.http.routes.pages import PAGES as PAGE_FILES
from shoal_service.core.endings import ENDINGS
from shoal_service.core.goodput import Category
from shoal_service.telemetry.catalogue import RecoveryPhase
from shoal_workers.contract.job import JobState
from shoal_workers.contract.profiles import Category as StepPart

STATIC = files("shoal_api.http").joinpath("static")
PAGES = ("/", "/docs", "/workspace", "/compare", "/sweeps", "/models", "/fleet", "/account", "/runbook")
SCRIPTS = tuple(sorted(f"/static/{part.name}" for part in STATIC.iterdir() if part.name.endswith(".js")))
NAMESPACE = "http://www.w3.org/2000/svg"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.ids: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href"):
                self.sources.append(value or "")
            elif name == "id":
                self.ids.add(value or "")
            elif name == "style" or name.startswith("on"):
                self.inline.append(name)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_only_what_this_service_serves(service: Any, path: str) -> None:
    answer = service.http.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    links = Links()
    links.feed(answer.text)
    assert not links.inline, "the policy would block it"
    for source in links.sources:
        if source != "data:," and not source.startswith("#"):
            assert source.startswith("/")
            assert service.http.get(source).status_code == 200


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS, "/static/style.css"])
def test_no_page_names_another_host(service: Any, path: str) -> None:
    text = service.http.get(path).text.replace(NAMESPACE, "")
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text)


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_never_write_markup(service: Any, path: str) -> None:
    text = service.http.get(path).text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc", text)


@pytest.mark.parametrize("page", [part.name for part in STATIC.iterdir() if part.name.endswith(".html")])
def test_the_modules_of_a_page_find_every_element_that_they_look_up(page: str) -> None:
    text = STATIC.joinpath(page).read_text()
    links = Links()
    links.feed(text)
    entry = re.search(r'src="/static/(\w+\.js)" type="module"', text)
    assert entry is not None or page in ("missing.html", "runbook.html")
    made_later = {
        "tab-overview",
        "dialog-value",
        "export-command",
        "profile-steps",
        "view-project",
        "drain-minutes",
    }
    made_later |= {f"quota-{name}" for name in ("name", "limit", "guaranteed", "weight", "running", "queued", "parent")}
    modules = _modules(entry[1], set()) if entry else ()
    sought = {name for module in modules for name in _ids(STATIC.joinpath(module).read_text())}
    assert sought - made_later <= links.ids


def _modules(name: str, seen: set[str]) -> set[str]:
    """A module and all that it imports."""
    if name not in seen:
        seen.add(name)
        for imported in re.findall(r'from "\./(\w+\.js)"', STATIC.joinpath(name).read_text()):
            _modules(imported, seen)
    return seen


def _ids(script: str) -> set[str]:
    return set(re.findall(r'(?:\$|fill|fillEach|fillFacts|rows|say|onSubmit)\(\s*"([\w-]+)"', script))


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_parse(service: Any, tmp_path: Path, path: str) -> None:
    script = tmp_path / "script.js"
    script.write_text(service.http.get(path).text)
    node = require("node", "node", "nodejs")
    checked = subprocess.run([node, "--check", str(script)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_every_category_and_phase_has_a_column_and_a_colour(service: Any) -> None:
    script, style = (service.http.get(path).text for path in ("/static/stripe.js", "/static/style.css"))
    found = re.findall(r"^export const ([A-Z]+) = (\[[^\]]+\]);$", script, re.M)
    shown = {name: re.findall(r'"(\w+)"', values) for name, values in found}
    assert shown["CATEGORIES"] == [category.value for category in Category]
    assert shown["PHASES"] == [phase.value for phase in RecoveryPhase if phase is not RecoveryPhase.RECOVERY]
    assert all(f".{name}" in style for name in [*shown["CATEGORIES"], *shown["PHASES"]])


def test_every_part_of_a_profiled_step_has_a_colour(service: Any) -> None:
    script, style = (service.http.get(path).text for path in ("/static/profiles.js", "/static/style.css"))
    [parts] = re.findall(r"^export const PARTS = (\[.+\]);$", script, re.M)
    assert json.loads(parts) == [part.value for part in StepPart]
    assert all(f".{part} {{" in style for part in StepPart)


def test_a_job_has_its_own_address_and_an_unknown_one_is_not_found(service: Any, spec: dict[str, Any]) -> None:
    job = service.client.submit(spec)
    assert service.http.get(f"/jobs/{job.id}").status_code == 200
    unknown = service.http.get("/jobs/job-0")
    assert unknown.status_code == 404 and "text/html" in unknown.headers["content-type"]


def test_the_page_of_a_job_leads_to_its_dashboard_if_the_server_has_a_grafana(serve: Any, service: Any) -> None:
    url, _ = serve(grafana_url="https://graphs.example.org/g/")
    pages = [httpx.get(f"{base}/jobs/job-0", headers=dict(service.http.headers)) for base in (url, service.url)]
    linked, plain = (re.findall(r"<a [^>]*>Grafana</a>", page.text) for page in pages)
    assert linked == ['<a href="https://graphs.example.org/g/d/shoal-job?var-job=job-0">Grafana</a>']
    assert plain == [] and 'id="grafana"' not in pages[1].text
    assert pages[0].headers["etag"] != pages[1].headers["etag"]
    assert json.loads((Path(__file__).parents[2] / "deploy/grafana/job.json").read_text())["uid"] == "shoal-job"


def test_every_state_has_a_colour_and_running_is_not_that_of_succeeded() -> None:
    text = STATIC.joinpath("states.js").read_text()
    colours = dict(re.findall(r"(\w+): \"(\w+)\"", text.partition("COLOURS")[2].partition("}")[0]))
    assert set(colours) == {state.value for state in JobState}
    assert colours["RUNNING"] != colours["SUCCEEDED"]


def test_every_reason_that_fails_a_job_has_a_way_out() -> None:
    text = STATIC.joinpath("ways_out.js").read_text()
    ways = re.findall(r"^  (\w+):\s+\".+\.\",$", text, re.M)
    assert set(ways) == {reason.value for reason, ending in ENDINGS.items() if ending.state is JobState.FAILED}


def test_own_files_are_revalidated_and_libraries_are_kept(service: Any) -> None:
    own = service.http.get("/static/job.js")
    assert own.headers["cache-control"] == "no-cache"
    again = service.http.get("/static/job.js", headers={"If-None-Match": own.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for library in LIBRARIES:
        packed = service.http.get(library.url, headers={"Accept-Encoding": "gzip"})
        assert "immutable" in packed.headers["cache-control"] and packed.headers["content-encoding"] == "gzip"
        plain = service.http.get(library.url, headers={"Accept-Encoding": "identity"})
        assert plain.content == packed.content == library.read()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_its_modules_as_one_file_that_the_browser_keeps(service: Any, tmp_path: Path, path: str) -> None:
    text = service.http.get(path).text
    scripts = re.findall(r'<script src="([^"]+)" type="module">', text)
    written = re.findall(r'src="/static/(\w+\.js)" type="module"', STATIC.joinpath(_page(path)).read_text())
    if not written:
        assert scripts == []
        return
    [bundle] = scripts
    packed = service.http.get(bundle, headers={"Accept-Encoding": "gzip"})
    assert "immutable" in packed.headers["cache-control"] and packed.headers["content-encoding"] == "gzip"
    assert packed.content == service.http.get(bundle, headers={"Accept-Encoding": "identity"}).content
    expected = set[str]().union(*(_modules(entry, set()) for entry in written))
    assert sorted(re.findall(r"^// ([\w-]+\.js)$", packed.text, re.M)) == sorted(expected)
    script = tmp_path / "bundle.mjs"
    script.write_text(packed.text)
    node = require("node", "node", "nodejs")
    checked = subprocess.run([node, "--check", str(script)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    older = service.http.get(re.sub(r"/static/\w+/", "/static/0000/", bundle))
    assert older.content == packed.content and older.headers["cache-control"] == "no-cache"
    assert service.http.get(bundle.replace(".page.js", ".page.jx")).status_code == 404
    assert service.http.get(bundle.rpartition("/")[0] + "/fleet.html").status_code == 404


def _page(path: str) -> str:
    return "runbook.html" if path == "/runbook" else PAGE_FILES[path]


def test_joined_modules_do_what_the_separate_ones_do(tmp_path: Path) -> None:
    modules = {
        "base.js": b"export const ONE = 1;\nexport function twice(x) { return 2 * x; }\nlet own = 5;\n",
        "user.js": b'import { ONE as first, twice } from "./base.js";\nconst own = 7;\n'
        b"export class Box { constructor() { this.value = twice(first) + own; } }\n",
        "main.js": b'import { Box } from "./user.js";\nimport "./base.js";\nconsole.log(new Box().value);\n',
    }
    text = page_files.join_modules(["main.js"], modules)
    assert text is not None
    script = tmp_path / "joined.mjs"
    script.write_text(text)
    node = require("node", "node", "nodejs")
    ran = subprocess.run([node, str(script)], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "9\n", ran.stderr


@pytest.mark.parametrize(
    "other",
    [
        'import * as all from "./a.js";\n',
        'export { x } from "./a.js";\n',
        "export let x = 1;\n",
        'import { absent } from "./a.js";\n',
        'import { b } from "./main.js";\n',
        "await fetch('/');\n",
    ],
)
def test_modules_with_other_forms_stay_separate(other: str) -> None:
    assert page_files.join_modules(["main.js"], {"main.js": other.encode(), "a.js": b"export const x = 1;\n"}) is None


def test_the_modules_stay_small() -> None:
    sizes = {part.name: len(part.read_text().splitlines()) for part in STATIC.iterdir() if part.name.endswith(".js")}
    assert {name: size for name, size in sizes.items() if size > 350} == {}


def test_every_chart_is_drawn_by_the_module_that_leaves_out_the_upload() -> None:
    texts = {part.name: part.read_text() for part in STATIC.iterdir() if part.name.endswith(".js")}
    assert [name for name, text in texts.items() if "Plotly." in text and "window" in text] == ["plot.js"]
    assert "showSendToCloud: false" in texts["plot.js"] and 'plotlyServerURL: ""' in texts["plot.js"]


def test_a_browser_gets_a_page_for_an_address_that_does_not_exist_and_a_program_gets_a_problem(service: Any) -> None:
    page = service.http.get("/no-such-page", headers={"accept": "text/html,*/*"})
    assert page.status_code == 404 and "There is no such page" in page.text
    links = Links()
    links.feed(page.text)
    assert [source for source in links.sources if service.http.get(source).status_code != 200] == []
    problem = service.http.get("/no-such-page", headers={"accept": "application/json"})
    assert problem.status_code == 404 and problem.json()["type"].endswith("not-found")
    assert service.http.get("/favicon.ico").headers["content-type"] == "image/svg+xml"
