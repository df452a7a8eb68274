"""Every relative link in the pages leads to a file that exists, and every anchor to a heading of that file."""

import re
from functools import cache
from pathlib import Path

from kit.sources import ROOT, relative

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_MENTION = re.compile(r"(?<![\w/.])((?:docs|tests|tools|examples|deploy)/[\w/.-]+\.(?:md|py|yaml|jsonl|json|env|sh)\b)")


def test_links_and_anchors_exist() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                broken.append(f"{relative(page)}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
                broken.append(f"{relative(page)}: {link}: no such heading")
    assert broken == []


def test_files_that_a_page_names_exist() -> None:
    names = {(page, name) for page in PAGES for name in _MENTION.findall(page.read_text("utf-8"))}
    assert sorted(f"{relative(page)}: {name}" for page, name in names if not (ROOT / name).exists()) == []


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of the headings as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    anchors: set[str] = set()
    for heading in headings:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        anchor, n = base, 0
        while anchor in anchors:
            n += 1
            anchor = f"{base}-{n}"
        anchors.add(anchor)
    return anchors
