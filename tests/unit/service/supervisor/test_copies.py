"""The code of an attempt survives what Ray forgets about its package."""

from __future__ import annotations

from doubles.fake_key_values import FakeKeyValueStore
from shoal_service.supervisor.copies import CodePackage, drop_unheld, version_of
from shoal_service.supervisor.journal import GcsJournal
from shoal_workers.ray_internals import package_uri

ARCHIVE = b"a zip archive"
URI = package_uri(version_of(ARCHIVE))


class Head:
    def __init__(self) -> None:
        self.packages, self.copies = FakeKeyValueStore(), FakeKeyValueStore()

    def package(self, job_id: str = "job", attempt: int = 1) -> CodePackage:
        return CodePackage(self.packages, self.copies, job_id, attempt, URI)

    def end(self, job_id: str) -> None:
        GcsJournal(self.copies, job_id, 1).delete()
        drop_unheld(self.copies)


def test_a_package_that_ray_has_deleted_is_there_again_before_the_next_worker() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.delete(URI.encode())
    head.package().restore()  # by a later supervisor
    assert head.packages.get(URI.encode()) == ARCHIVE


def test_equal_code_is_there_once_and_goes_with_the_last_attempt_that_has_it() -> None:
    """The head kept a copy for each attempt: forty jobs of one sweep with 16 MiB were 640 MiB of its memory."""
    head = Head()
    jobs = [f"job-{number}" for number in range(40)]
    for job_id in jobs:
        head.package(job_id).store(ARCHIVE)
    assert list(head.copies.values.values()).count(ARCHIVE) == 1
    for job_id in jobs[1:]:
        head.end(job_id)
    head.packages.delete(URI.encode())
    head.package(jobs[0]).restore()
    assert head.packages.get(URI.encode()) == ARCHIVE, "another job still has it"
    head.end(jobs[0])
    assert head.copies.values == {}


def test_an_attempt_whose_supervisor_has_deleted_its_journal_holds_no_code() -> None:
    head = Head()
    head.package("gone").store(ARCHIVE)
    GcsJournal(head.copies, "gone", 1).delete()  # by its supervisor; its cluster was away when it was to be ended
    head.end("other")
    assert head.copies.values == {}


def test_code_that_the_head_has_is_not_uploaded_again() -> None:
    head = Head()
    assert not head.package().hold()
    head.package().store(ARCHIVE)
    head.packages.delete(URI.encode())
    assert head.package("other").hold() and head.packages.get(URI.encode()) == ARCHIVE
    head.end("job")
    assert head.package("third").hold(), "the other one keeps it"


def test_an_attempt_that_has_not_begun_keeps_code_that_is_on_its_way() -> None:
    head = Head()
    assert not head.package("slow").hold()
    head.end("other")
    head.package("slow").store(ARCHIVE)
    head.end("other")
    assert head.package("slow").hold()


def test_while_the_head_is_away_nothing_is_raised() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.is_away = head.copies.is_away = True
    head.package().restore()
    drop_unheld(head.copies)
