"""Classes of the contract are found under the paths of earlier releases."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from kit.cases import failed_cases
from shoal_workers.contract.released_paths import MOVED

_RELEASED = {
    "code.spec": "CodeSpec SecretSource",
    "course.best": "Score Standing",
    "course.continuing": "ContinueFrom",
    "course.settings": "TrainingSettings",
    "course.sweep": "SweepSpec",
    "course.training": "ScheduleSpec StopSpec ValidationSpec",
    "errors.classes": "ErrorClass FrameOwner Origin",
    "errors.suspects": "Collective Link Resource Suspect",
    "metrics.messages": "HookJob MetricPoint MetricsBatch MetricsProgress",
    "metrics.spec": "MetricsSpec",
    "model.plan": "ParallelPlan TensorStyle",
    "model.shape": "ModelShape",
    "profiling.messages": "Category ProfileFile ProfileRequest Profiled StepTimes",
    "spec": "BatchSpec CheckpointSpec CodeSpec DamagePolicy ElasticitySpec GradientLogMode HealthSpec JobSpec "
    "NonFinitePolicy OptimizerSpec ParallelismSpec Precision RetrySpec ScheduleSpec SnapshotSpec StopSpec "
    "TimeoutsSpec ValidationSpec WorkerSpec",
    "webhooks.spec": "WebhookSpec",
    "worker_use": "WorkerUse",
}
"""The modules of releases that have no file now, and the spec's, each with the classes that were pickled from there."""


def test_no_module_of_a_release_is_left_out() -> None:
    assert {*_RELEASED} == {*MOVED, "spec"}


def test_pickle_finds_a_class_by_its_old_path() -> None:
    def check(released: tuple[str, str]) -> None:
        path, name = released
        match = pickle.loads(f"cshoal_workers.contract.{path}\n{name}\n.".encode())
        assert isinstance(match, type) and match.__name__ == name

    assert failed_cases(check, [(path, name) for path in _RELEASED for name in _RELEASED[path].split()]) == {}


@pytest.mark.parametrize(
    ("path", "name"), [("course.training", "StopSpec"), ("model.plan", "TensorStyle"), ("webhooks.spec", "WebhookSpec")]
)
def test_it_does_so_as_the_first_thing_in_a_process(path: str, name: str) -> None:
    code = (
        "import pickle, sys; "
        f"pickle.loads(b'cshoal_workers.contract.{path}\\n{name}\\n.'); "
        "assert 'shoal_workers.contract.messages' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_old_path_has_no_file_of_its_own() -> None:
    files = {path: getattr(sys.modules[f"shoal_workers.contract.{path}"], "__file__", None) for path in MOVED}
    assert {path: file for path, file in files.items() if file is not None} == {}
