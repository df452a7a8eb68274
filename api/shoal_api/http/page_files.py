"""The files of the pages: their bytes, and addresses that change with their content.

    /static/dom.js                       revalidated by its ETag
    /static/<digest>/style.css           the same, kept by the browser for a year: the digest is that of all files
    /static/<digest>/workspace.page.js   all modules of the page workspace.html, in the order in which they run

A page is given the last two. A browser that has never seen it then asks for one script instead of twenty; each request
takes some ten milliseconds on a busy machine. Modules stay separate files for those who write them. Joining them needs
no parser because they use few forms of `import` and `export`; a page that has another form keeps its separate modules.

The JavaScript libraries of the pages arrive as Python packages (decision 0031). A library has its version in its
address, so that the browser keeps it for a year. Called by `routes/pages.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from shoal_api.http.conditional import make_etag

_OWN = re.compile(rb'(href|src)="/static/(\w[\w.-]*)"')
_SCRIPT = re.compile(r'<script src="/static/([\w-]+\.js)" type="module"></script>\n?')
_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./([\w-]+\.js)";', re.M)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) ([A-Za-z_$][\w$]*)", re.M)
_OTHER_FORM = re.compile(r"^(?:import|export|await)\b", re.M)
_BUNDLE = ".page.js"


@cache
def read_sources() -> Mapping[str, bytes]:
    """Return the files by name, as they are written."""
    return {part.name: part.read_bytes() for part in files("shoal_api.http").joinpath("static").iterdir()}


@cache
def compute_digest() -> str:
    """Return the part of addresses that changes with any file."""
    hasher = hashlib.sha256()
    for name, body in sorted(read_sources().items()):
        hasher.update(f"{name} {len(body)} ".encode() + body)
    return hasher.hexdigest()[:16]


@cache
def read_served(name: str) -> tuple[bytes, str]:
    """Return the bytes and the ETag of a file, of the modules of a page (`NAME.page.js`), or of a page, in which the
    names of files stand for their addresses. Raises KeyError if there is no such file."""
    if name.endswith(_BUNDLE):
        modules_text = _join_page(f"{name.removesuffix(_BUNDLE)}.html")
        if modules_text is None:
            raise KeyError(name)
        body = modules_text.encode()
    else:
        body = read_sources()[name]
        if name.endswith(".html"):
            body = _with_addresses(name)
    return body, make_etag(body)


@cache
def compress_served(name: str) -> bytes:
    """Return what `read_served` returns, compressed by gzip."""
    return gzip.compress(read_served(name)[0], compresslevel=6, mtime=0)


def _with_addresses(page: str) -> bytes:
    text = read_sources()[page].decode()
    for library in LIBRARIES:
        text = text.replace(f"/static/vendor/{library.name}", library.url)
    if _SCRIPT.search(text) and _join_page(page) is not None:
        bundle = f"/static/{page.removesuffix('.html')}{_BUNDLE}"
        text = _SCRIPT.sub("", text).replace("</head>", f'<script src="{bundle}" type="module"></script>\n</head>', 1)
    return _OWN.sub(rb'\1="/static/%s/\2"' % compute_digest().encode(), text.encode())


@cache
def _join_page(page: str) -> str | None:
    return join_modules(_SCRIPT.findall(read_sources()[page].decode()), read_sources())


def join_modules(entries: Iterable[str], modules: Mapping[str, bytes]) -> str | None:
    """Return modules and all that they import as one, each in a function that returns what it exports; None if one of
    them uses a form of import or export that this does not know, or imports in a circle."""
    bundle = _Bundle(modules)
    try:
        for entry in entries:
            bundle.add(entry)
    except _UnknownFormError:
        return None
    return "\n".join(bundle.parts.values())


class _UnknownFormError(Exception):
    pass


class _Bundle:
    def __init__(self, modules: Mapping[str, bytes]) -> None:
        self._modules = modules
        self._exported: dict[str, set[str]] = {}
        self.parts: dict[str, str] = {}

    def add(self, name: str, within: tuple[str, ...] = ()) -> None:
        """Add a module behind those that it imports. Raises _UnknownFormError."""
        if name in self.parts:
            return
        if name in within or name not in self._modules:
            raise _UnknownFormError
        text = self._modules[name].decode()
        for match in _IMPORT.finditer(text):
            self.add(match[2], (*within, name))
            imported_names = {bound_name.partition(" as ")[0].strip() for bound_name in (match[1] or "").split(",")} - {
                ""
            }
            if not imported_names <= self._exported[match[2]]:
                raise _UnknownFormError
        self._exported[name] = {match[2] for match in _EXPORT.finditer(text)}
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(_make_binding, text))
        if _OTHER_FORM.search(text):
            raise _UnknownFormError
        names = ", ".join(sorted(self._exported[name]))
        self.parts[name] = f"// {name}\nconst {_make_variable(name)} = (() => {{\n{text}return {{ {names} }};\n}})();"


def _make_binding(match: re.Match[str]) -> str:
    return f"const {{{(match[1] or '').replace(' as ', ': ')}}} = {_make_variable(match[2])};"


def _make_variable(name: str) -> str:
    return "$of_" + re.sub(r"\W", "_", name)


@dataclass(frozen=True, slots=True)
class Library:
    """A file of an installed Python package."""

    package: str
    distribution: str
    path: str
    media_type: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def url(self) -> str:
        return f"/static/vendor/{version(self.distribution)}/{self.name}"

    def read(self) -> bytes:
        """Reads the file without importing the package."""
        spec = find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, f"{self.distribution} is a dependency of Shoal"
        return Path(spec.submodule_search_locations[0], self.path).read_bytes()


LIBRARIES = (
    Library("plotly", "plotly", "package_data/plotly.min.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui-bundle.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui.css", "text/css"),
)
