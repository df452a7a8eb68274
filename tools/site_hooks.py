"""Hooks of mkdocs (mkdocs.yml): pages that are outside docs/, links that leave it, and the list of decisions.

README.md becomes the first page. A link from a page to a file of the repository leads to a copy of it in the site, one
to a folder becomes plain text. mkdocs calls the functions; tests/browser/test_site.py builds the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_PAGES = {"index.md": "README.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
"""Page of the site -> file of the repository."""
_ASSETS = {"assets/iframe-worker.js": "tools/site_worker.js"}
_LINK = re.compile(r"(!?)\[([^][]*(?:\[[^]]*\][^][]*)*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
_SCHEME = re.compile(r"[a-z]+:")
_SOURCE = "source"
"""Folder of the site with copies of files of the repository."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    for section in config.nav or ():
        if isinstance(section, dict) and "Decisions" in section:
            section["Decisions"] = [f"decisions/{name}" for name in decisions]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in {**_PAGES, **_ASSETS}.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for source in sorted(_linked_files(config)):
        files.append(File.generated(config, f"{_SOURCE}/{source}", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = _place(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        if _SCHEME.match(target):
            return match[0]
        found = _in_repository(place, target)
        if not (ROOT / found).is_file():
            return text if (ROOT / found).is_dir() else match[0]
        link = posixpath.relpath(_in_site(found), posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({link}{anchor or ''})"

    parts = _FENCE.split(markdown)
    # Odd parts are code. A link's text may be code itself, so such links are found in the whole text first.
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in _joined(parts))


def _joined(parts: list[str]) -> list[str]:
    """Puts code within a line back into its text: only fences stay apart."""
    found = [""]
    for part in parts:
        if part.startswith("```"):
            found += [part, ""]
        else:
            found[-1] += part
    return found


def _place(page: str) -> str:
    """The path of a page's file in the repository."""
    return _PAGES.get(page, f"docs/{page}")


def _in_repository(place: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def _in_site(file: str) -> str:
    for page, source in _PAGES.items():
        if file == source:
            return page
    path = PurePosixPath(file)
    return str(path.relative_to("docs")) if path.parts[0] == "docs" else f"{_SOURCE}/{file}"


def _linked_files(config: MkDocsConfig) -> set[str]:
    """Files outside docs/ that pages link to."""
    pages = [*Path(config.docs_dir).rglob("*.md"), *(ROOT / source for source in _PAGES.values())]
    found = set()
    for page in pages:
        place = page.relative_to(ROOT).as_posix()
        for _, _, target, _ in _LINK.findall(page.read_text("utf-8")):
            file = _in_repository(place, target)
            if not _SCHEME.match(target) and (ROOT / file).is_file() and _in_site(file).startswith(f"{_SOURCE}/"):
                found.add(file)
    return found
