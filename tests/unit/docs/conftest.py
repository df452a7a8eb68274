"""The generator of the pages, loaded as `make docs` runs it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

GENERATOR = Path(__file__).resolve().parents[3] / "tools" / "docs_pages.py"


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shoal_docs_generate", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
