"""What every checkpoint Catalog does."""

import pytest

from shoal_service.supervisor.protocols import Catalog, Deleter, Found
from shoal_workers.checkpoint.errors import AttemptFollowed, CommitConflict, DamagedCheckpoint
from shoal_workers.contract.ids import next_generation
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedFile, SavedPart

ROOT_NAME = "j1"


def name(step: int, generation: int = 1, attempt: int = 1) -> CheckpointName:
    return CheckpointName(step, attempt, generation)


class CatalogContract:
    def make(self) -> Catalog:
        raise NotImplementedError

    def write(self, catalog: Catalog, name: CheckpointName, file: str, num_bytes: int) -> None:
        """A rank writes a file of its part."""
        raise NotImplementedError

    def parts(
        self, catalog: Catalog, step: int, *, generation: int = 1, world_size: int = 2, attempt: int = 1
    ) -> list[SavedPart]:
        """The parts of all ranks, written."""
        made = []
        directory = name(step, generation, attempt)
        for rank in range(world_size):
            file = SavedFile(name=f"shard-{rank:05d}.bin", bytes=10 + rank, crc32=0)
            self.write(catalog, directory, file.name, file.bytes)
            made.append(
                SavedPart(
                    generation=generation,
                    step=step,
                    rank=rank,
                    world_size=world_size,
                    directory=catalog.url(directory),
                    files=(file,),
                    stall_s=0.1,
                    write_s=0.2,
                )
            )
        return made

    def commit(self, catalog: Catalog, step: int, *, generation: int = 1, attempt: int = 1) -> None:
        parts = self.parts(catalog, step, generation=generation, attempt=attempt)
        marker = catalog.commit(parts, job_id="j1", attempt=attempt, now=5.0)
        assert (marker.step, marker.generation, marker.world_size) == (step, generation, 2)
        assert (marker.committed_at, [file.bytes for file in marker.files]) == (5.0, [10, 11])

    def test_an_empty_root_can_be_used_and_holds_nothing(self) -> None:
        catalog = self.make()
        catalog.check_writable()
        assert catalog.search().name is None
        assert catalog.remove_torn(in_flight=()) == []

    def test_a_checkpoint_exists_once_it_is_committed(self) -> None:
        catalog = self.make()
        parts = self.parts(catalog, 4)
        assert catalog.search().name is None
        catalog.commit(parts, job_id="j1", attempt=1, now=5.0)
        catalog.commit(parts, job_id="j1", attempt=1, now=6.0)  # repeated after a restart
        assert catalog.search().name == name(4)
        assert catalog.url(name(4)).endswith(f"/{name(4)}")

    def test_the_first_commit_stays(self) -> None:
        catalog = self.make()
        parts = self.parts(catalog, 4)
        first = catalog.commit(parts, job_id="j1", attempt=1, now=5.0)
        assert catalog.commit(parts, job_id="j1", attempt=1, now=6.0) == first, "repeated by a restarted supervisor"
        file = SavedFile(name="shard-00000.bin", bytes=10, crc32=99)
        others = [parts[0].model_copy(update={"files": (file,)}), parts[1]]
        with pytest.raises(CommitConflict):
            catalog.commit(others, job_id="j1", attempt=1, now=7.0)
        assert catalog.search().name == name(4)

    def test_a_replaced_supervisor_deletes_nothing_and_what_a_later_one_wrote_stays(self) -> None:
        class Replaced(Exception):
            pass

        def refuse() -> None:
            raise Replaced

        catalog = self.make()
        later = next_generation(1, life=2)
        for step in (4, 8):
            self.commit(catalog, step)
        self.parts(catalog, 6, generation=later)
        with pytest.raises(Replaced):
            catalog.retain(1, damaged=(), in_flight=(), by=Deleter(1, 1, refuse))
        assert catalog.remove_torn(in_flight=(), by=Deleter(1, 1, lambda: None)) == []
        assert catalog.retain(1, damaged=(), in_flight=(), by=Deleter(1, 1, lambda: None)) == [name(4)]
        assert catalog.remove_torn(in_flight=(), by=Deleter(1, 2, lambda: None)) == [name(6, later)]

    def test_the_newest_checkpoint_is_found_except_for_excluded_ones(self) -> None:
        catalog = self.make()
        for step in (4, 8, 12):
            self.commit(catalog, step)
        assert catalog.search().name == name(12)
        assert catalog.search(excluding=[name(12)]).name == name(8)
        assert catalog.search(excluding=[name(12), name(8)]).name == name(4)
        assert catalog.search(excluding=[name(12), name(8), name(4)]).name is None

    def test_a_missing_or_shorter_part_is_not_committed(self) -> None:
        catalog = self.make()
        parts = self.parts(catalog, 4)
        longer = SavedFile(name="shard-00001.bin", bytes=99, crc32=0)
        missing = SavedFile(name="shard-00009.bin", bytes=10, crc32=0)
        for file in (longer, missing):
            wrong = [parts[0], parts[1].model_copy(update={"files": (file,)})]
            with pytest.raises(DamagedCheckpoint, match=file.name):
                catalog.commit(wrong, job_id="j1", attempt=1, now=5.0)
        assert catalog.search().name is None

    def test_old_checkpoints_are_deleted_and_those_in_flight_are_kept(self) -> None:
        catalog = self.make()
        for step in (4, 8, 12):
            self.commit(catalog, step)
        assert catalog.retain(1, damaged=(), in_flight=[name(4)]) == [name(8)]
        assert catalog.retain(1, damaged=(), in_flight=()) == [name(4)]
        assert catalog.search().name == name(12)

    def test_pinned_checkpoints_stay_also_damaged_ones(self) -> None:
        catalog = self.make()
        for step in (4, 8, 12, 16):
            self.commit(catalog, step)
        pinned = [name(4), name(8), name(99)]
        assert catalog.retain(1, damaged=[name(8)], in_flight=(), pinned=pinned) == [name(12)]
        assert catalog.retain(1, damaged=[name(8)], in_flight=()) == [name(4), name(8)]

    def test_a_damaged_checkpoint_does_not_count_as_one_to_keep(self) -> None:
        catalog = self.make()
        for step in (4, 8):
            self.commit(catalog, step)
        assert catalog.retain(1, damaged=[name(8)], in_flight=()) == []

    def test_directories_that_were_never_committed_are_deleted_except_for_those_in_flight(self) -> None:
        catalog = self.make()
        self.commit(catalog, 4)
        self.parts(catalog, 8)
        self.parts(catalog, 12)
        assert catalog.remove_torn(in_flight=[name(12)]) == [name(8)]
        assert catalog.search().name == name(4)

    def test_what_an_earlier_attempt_commits_after_a_later_one_has_begun_never_counts(self) -> None:
        catalog = self.make()
        catalog.begin(1)
        for step in (4, 8):
            self.commit(catalog, step)
        late = self.parts(catalog, 12)
        catalog.begin(2)
        with pytest.raises(AttemptFollowed, match="attempt 2 of the job has begun, so attempt 1 is over"):
            catalog.commit(late, job_id="j1", attempt=1, now=6.0)
        assert catalog.search() == Found(name(8), (), name(8))
        assert catalog.search(excluding=[name(8)]) == Found(name(4), (), name(8))
        self.commit(catalog, 10, attempt=2)
        assert catalog.search().name == name(10, attempt=2)
        catalog.begin(3)
        self.commit(catalog, 11, attempt=3)
        assert catalog.search(excluding=[name(11, attempt=3)]).name == name(10, attempt=2)

    def test_an_attempt_that_is_followed_deletes_nothing_that_the_later_one_needs(self) -> None:
        catalog = self.make()
        catalog.begin(1)
        for step in (4, 8):
            self.commit(catalog, step)
        catalog.begin(2)
        assert catalog.retain(1, damaged=(), in_flight=(), by=Deleter(1, 1, lambda: None)) == []
        assert catalog.retain(1, damaged=(), in_flight=(), by=Deleter(2, 1, lambda: None)) == [name(4)]

    def test_an_attempt_begins_once_and_its_first_list_stays(self) -> None:
        catalog = self.make()
        catalog.begin(2)
        self.commit(catalog, 4, attempt=2)
        catalog.begin(2)  # the next supervisor of the attempt
        assert catalog.search().name == name(4, attempt=2)
