"""Classes of the contract are found under the paths of earlier releases."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from shoal_workers.contract.messages import WorkerUse
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.released_paths import MOVED
from shoal_workers.contract.spec import WebhookSpec
from shoal_workers.contract.suspects import Suspect
from shoal_workers.contract.validation import Standing


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("model.plan", ParallelPlan),
        ("profiling.messages", ProfileRequest),
        ("webhooks.spec", WebhookSpec),
        ("errors.suspects", Suspect),
        ("course.best", Standing),
        ("worker_use", WorkerUse),
    ],
)
def test_pickle_finds_a_class_by_its_old_path(path: str, kind: type) -> None:
    document = f"cshoal_workers.contract.{path}\n{kind.__name__}\n.".encode()
    assert pickle.loads(document) is kind


def test_it_does_so_as_the_first_thing_in_a_process() -> None:
    code = (
        "import pickle, sys; "
        "pickle.loads(b'cshoal_workers.contract.course.training\\nStopSpec\\n.'); "
        "assert 'shoal_workers.contract.messages' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", MOVED)
def test_an_old_path_has_no_file_of_its_own(path: str) -> None:
    assert getattr(sys.modules[f"shoal_workers.contract.{path}"], "__file__", None) is None
