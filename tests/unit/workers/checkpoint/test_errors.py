"""Errors say what, where and what to do, and cross process borders."""

import pickle

import pytest

from shoal_workers.checkpoint.errors import (
    CheckpointError,
    CommitConflict,
    DamagedCheckpoint,
    StateMismatch,
    StorageUnusable,
)

_ERRORS = [
    DamagedCheckpoint("s3://b/step", "shard-00001.bin", "is missing"),
    StateMismatch("/ckpt", [f"it has no tensor{i}" for i in range(9)]),
    StorageUnusable("/nowhere", "PermissionError", "Use another directory."),
    CommitConflict("/ckpt"),
]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: CheckpointError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_codes_are_distinct_and_stable() -> None:
    assert [error.code for error in _ERRORS] == [
        "damaged_checkpoint",
        "state_mismatch",
        "storage_unusable",
        "commit_conflict",
    ]


def test_damage_names_directory_file_and_problem() -> None:
    assert str(_ERRORS[0]) == "Checkpoint s3://b/step is damaged: shard-00001.bin is missing."


def test_mismatch_shows_the_first_few_problems_and_counts_the_rest() -> None:
    assert "it has no tensor4; and 4 more" in str(_ERRORS[1])
