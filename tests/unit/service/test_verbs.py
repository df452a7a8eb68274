"""The table of verbs: each has a row, and what carries it out has the same parameters."""

import inspect

import pytest
from pydantic import ValidationError

from doubles.fake_cluster import FakeCluster
from doubles.fake_ray import FakeRay
from shoal_service.clusters.verbs import BY_METHOD, VERBS, GatewayVerbs, RayVerbs
from shoal_service.clusters.wire import MAX_WORDS
from shoal_service.gateway.ray_cluster import RayCluster

RAY, OWN = ({name for name in vars(one) if not name.startswith("_")} for one in (RayVerbs, GatewayVerbs))


def test_every_method_has_a_row() -> None:
    assert set(BY_METHOD) == RAY | OWN
    assert len(VERBS) == len(BY_METHOD)


def test_the_names_on_the_wire_change_only_on_purpose() -> None:
    assert {verb.method: kind for kind, verb in VERBS.items()} == {
        "start_supervisor": "StartSupervisor",
        "keep_ready": "KeepReady",
        "find_supervisor": "FindSupervisor",
        "why_gone": "WhyGone",
        "silent_supervisor": "SilentSupervisor",
        "replace_supervisor": "ReplaceSupervisor",
        "unrecorded_starts": "UnrecordedStarts",
        "last_ends": "LastEnds",
        "reap": "Reap",
        "fault_of_node": "FaultOfNode",
        "unused_packages": "ListUnusedPackages",
        "remove_packages": "RemovePackages",
        "request_room": "RequestRoom",
        "look_now": "LookNow",
        "upload_code": "UploadCode",
        "sees_storage": "SeesStorage",
    }


@pytest.mark.parametrize("method", sorted(RAY))
@pytest.mark.parametrize("kind", [RayCluster, FakeRay])
def test_what_speaks_ray_has_the_parameters_of_the_table(kind: type, method: str) -> None:
    found = getattr(kind, method)
    assert tuple(inspect.signature(found).parameters)[1:] == BY_METHOD[method].parameters


@pytest.mark.parametrize("method", sorted(RAY | OWN))
def test_the_fake_cluster_has_the_parameters_of_the_table(method: str) -> None:
    assert tuple(inspect.signature(getattr(FakeCluster, method)).parameters)[1:] == BY_METHOD[method].parameters


def test_a_call_becomes_a_document_without_unknown_keys() -> None:
    verb = VERBS["Reap"]
    assert verb.make_request("j", attempt=1).model_dump() == {"job_id": "j", "attempt": 1}
    with pytest.raises(ValidationError):
        verb.make_request("j")
    with pytest.raises(ValidationError):
        verb.request.model_validate_json('{"job_id": "j", "attempt": 1, "force": true}')


@pytest.mark.parametrize(
    ("kind", "answer"), [("WhyGone", f'"{"x" * (MAX_WORDS + 1)}"'), ("Reap", "-1"), ("Reap", '"all"'), ("LookNow", "1")]
)
def test_an_answer_out_of_bounds_is_refused(kind: str, answer: str) -> None:
    with pytest.raises(ValidationError):
        VERBS[kind].answer.validate_json(answer)
