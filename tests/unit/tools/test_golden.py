"""What each release has put on the wire and into its stores is read by today's code; today's is written down."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import golden
from kit.cases import failed_cases
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import Tick
from shoal_service.planner import plan
from shoal_service.supervisor.journal import JournalEntry
from shoal_workers.contract.base import WIRE_VERSION

VERSIONS = sorted(int(folder.name.removeprefix("wire-")) for folder in golden.ROOT.glob("wire-*"))
DOCUMENTS = sorted(path for path in golden.ROOT.glob("wire-*/*.json") if path.name != "fingerprints.json")
CHANGED = (
    "a document has changed. If wire version {} was released, raise WIRE_VERSION in shoal_workers/contract/base.py. "
    "Then run `python tools/golden.py`."
)


def test_every_version_since_the_first_that_is_read_is_kept() -> None:
    assert list(range(VERSIONS[0], WIRE_VERSION + 1)) == VERSIONS


def test_what_a_release_has_written_is_never_written_again() -> None:
    """A folder that may still change is the newest one, until its release."""
    released = golden.released()
    assert {int(version) for version in released} >= set(range(VERSIONS[0], WIRE_VERSION)), "tools/golden.py --release"
    for version, release in released.items():
        assert golden.digest(golden.ROOT / f"wire-{version}") == release["sha256"], f"wire-{version} has changed"


def test_the_calls_of_a_worker_are_part_of_the_version() -> None:
    found = {name: golden.calls(path, name) for path, name in golden.CALLS}
    assert found["WorkerActor"]["adopt"] == "self, life: int, generation: int" and "_run" not in found["WorkerActor"]
    fingerprints = json.loads((golden.ROOT / f"wire-{WIRE_VERSION}" / "fingerprints.json").read_text("utf-8"))
    assert all(found.values()) and set(found) <= set(fingerprints)


def test_a_document_of_every_release_is_read_from_json_and_from_pickle() -> None:
    def check(path: Path) -> None:
        values = golden.read(json.loads(path.read_text("utf-8")))
        assert all(_dumped(value) == _dumped(values[0]) for value in values)
        assert all(_missing(value) == [] for value in values), "fields that are new since then have their defaults"

    assert len(DOCUMENTS) > 10 and failed_cases(check, DOCUMENTS, _name) == {}


def test_an_attempt_goes_on_from_the_journal_of_every_release() -> None:
    def check(path: Path) -> None:
        [entry] = golden.read(json.loads(path.read_text("utf-8")))
        assert isinstance(entry, JournalEntry)
        after, _ = machine.step(entry.state, Tick(), 1006.0, plan)
        assert after.config == entry.state.config and after.stage is not None

    journals = [path for path in DOCUMENTS if path.name.startswith("journal_")]
    assert len(journals) > 5 and failed_cases(check, journals, _name) == {}


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_no_document_changes_without_a_new_version() -> None:
    """The folder of the current version is what the tool writes today."""
    folder = golden.ROOT / f"wire-{WIRE_VERSION}"
    written = golden.written()
    assert {path.name for path in folder.iterdir()} == set(written)
    for name, text in written.items():
        kept = golden.without_pickle((folder / name).read_text("utf-8"))
        assert golden.without_pickle(text) == kept, CHANGED.format(WIRE_VERSION)


def test_the_fingerprint_changes_with_a_field_and_not_with_its_description() -> None:
    class One(BaseModel):
        a: int
        """Described."""

    described = {"properties": {"a": {"type": "integer", "title": "A", "description": "Described."}}}
    plain = {"properties": {"a": {"type": "integer"}}}
    assert golden._hash(described) == golden._hash(plain) != golden._hash({"properties": {"a": {"type": "string"}}})
    assert golden._hash(One.model_json_schema()) == golden._hash(One.model_json_schema())


def _dumped(value: BaseModel) -> Any:
    return json.loads(value.model_dump_json())


def _missing(value: BaseModel) -> list[str]:
    return [name for name in type(value).model_fields if name not in value.__dict__]
