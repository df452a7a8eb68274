"""Packages keep the docstrings that STYLE.md asks for."""

import ast
import re

from kit.sources import relative, sources

_LEAST_DOCSTRING_LINES = 3
MODULES = sources("api", "service", "workers", "tests", "bench", "tools")


def test_a_package_says_what_is_inside_who_calls_it_and_what_it_never_does() -> None:
    packages = {path: ast.get_docstring(ast.parse(MODULES[path])) for path in MODULES if path.name == "__init__.py"}
    assert len(packages) > 80
    short = [
        relative(path) for path, text in packages.items() if len((text or "").splitlines()) < _LEAST_DOCSTRING_LINES
    ]
    assert short == []


def test_no_docstring_needs_the_name_before_it_to_be_read() -> None:
    fragment = re.compile(r'^\s*r?"""(?:\s*Of | *\.\.\.)', re.M)
    assert [relative(path) for path, text in MODULES.items() if fragment.search(text)] == [], (
        "write a sentence or a noun phrase that says what the thing is"
    )


def test_formatting_is_switched_off_only_with_a_reason() -> None:
    bare = re.compile(r"# fmt: (?:skip|off)\s*$", re.M)
    assert [relative(path) for path, text in MODULES.items() if bare.search(text)] == []
