"""The code of an attempt survives what Ray forgets about its package."""

from doubles.fake_key_values import FakeKeyValueStore
from shoal_service.supervisor.copies import CodePackage, version_of
from shoal_service.supervisor.journal import GcsJournal
from shoal_workers.ray_internals import package_uri

ARCHIVE = b"a zip archive"
URI = package_uri(version_of(ARCHIVE))


class Head:
    def __init__(self) -> None:
        self.packages, self.copies = FakeKeyValueStore(), FakeKeyValueStore()

    def package(self, job_id: str = "job", attempt: int = 1) -> CodePackage:
        return CodePackage(self.packages, self.copies, job_id, attempt, URI)


def test_a_package_that_ray_has_deleted_is_there_again_before_the_next_worker() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.delete(URI.encode())
    head.package().restore()  # by a later supervisor
    assert head.packages.get(URI.encode()) == ARCHIVE


def test_the_copy_goes_with_the_journal_and_not_with_that_of_another_job() -> None:
    head = Head()
    for job_id in ("job", "other"):
        head.package(job_id).store(ARCHIVE)
    GcsJournal(head.copies, "job", 1).delete()
    head.packages.delete(URI.encode())
    head.package("job").restore()
    assert head.packages.get(URI.encode()) is None
    head.package("other").restore()
    assert head.packages.get(URI.encode()) == ARCHIVE


def test_while_the_head_is_away_nothing_is_raised() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.is_away = True
    head.package().restore()
