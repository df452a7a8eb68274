"""Private keys of attempts: one per job, that of its newest attempt, on both databases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal_service.store import Lease, Store
from shoal_service.store.errors import JobNotFound, LeaseLost

Submit = Callable[..., str]


def test_a_key_is_that_of_one_attempt_and_the_next_one_replaces_it(store: Store, lease: Lease, submit: Submit) -> None:
    one, other = submit(), submit()
    assert store.signing_key(one, 1) is None
    store.keep_signing_key(one, 1, "11" * 32, epoch=lease.epoch)
    store.keep_signing_key(other, 1, "22" * 32, epoch=lease.epoch)
    assert (store.signing_key(one, 1), store.signing_key(other, 1)) == ("11" * 32, "22" * 32)
    store.keep_signing_key(one, 2, "33" * 32, epoch=lease.epoch)
    assert (store.signing_key(one, 1), store.signing_key(one, 2)) == (None, "33" * 32)


def test_only_the_owner_of_the_lease_makes_keys(store: Store, lease: Lease, submit: Submit) -> None:
    job_id = submit()
    with pytest.raises(LeaseLost):
        store.keep_signing_key(job_id, 1, "11" * 32, epoch=lease.epoch - 1)
    assert store.signing_key(job_id, 1) is None


def test_a_job_that_is_not_there_has_no_key(store: Store) -> None:
    with pytest.raises(JobNotFound):
        store.signing_key("job-none", 1)


def test_no_view_of_a_job_shows_its_key(store: Store, lease: Lease, submit: Submit) -> None:
    job_id = submit()
    store.keep_signing_key(job_id, 1, "1a" * 32, epoch=lease.epoch)
    assert "1a1a" not in store.get_job(job_id).model_dump_json()
    assert "1a1a" not in repr(store.jobs_to_drive())
