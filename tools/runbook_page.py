"""Writes the runbook of docs/operations.md as a page of the server, to which alerts link (`make docs`).

    python tools/runbook_page.py

A test compares the file with what this makes.
"""

from __future__ import annotations

import re
from pathlib import Path

from markdown import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "api" / "shoal_api" / "http" / "static" / "runbook.html"
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Shoal: runbook</title>
<link rel="icon" href="/static/favicon.svg">
<link rel="stylesheet" href="/static/style.css">
</head>
<body>
<header><a class="brand" href="/">Shoal</a><h1>Runbook</h1>
<nav><a href="/">Jobs</a><a href="/docs">API</a></nav></header>
<main>
<!-- Made by tools/runbook_page.py from docs/operations.md; edit that and run `make docs`. -->
"""


def main() -> None:
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """The whole page: one card for each alert, whose anchor is its name in lower case."""
    runbook = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("\n## Runbook\n")[2]
    introduction, *sections = re.split(r"^### ", runbook, flags=re.M)
    names = {section.partition("\n")[0] for section in sections}
    cards = [f'<section class="card"><h2>Runbook</h2>{_html(introduction, names)}</section>']
    for section in sections:
        name, _, body = section.partition("\n")
        cards.append(f'<section class="card" id="{name.lower()}"><h2>{name}</h2>{_html(body, names)}</section>')
    return _HEAD + "\n".join(cards) + "\n</main>\n</body>\n</html>\n"


def _html(body: str, alerts: set[str]) -> str:
    """Turns links to other pages, which the server does not have, into their words. Links to other alerts stay."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        return found[0] if target.removeprefix("#") in {name.lower() for name in alerts} else words

    return markdown(re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, body))


if __name__ == "__main__":
    main()
