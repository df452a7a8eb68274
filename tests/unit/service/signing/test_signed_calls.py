"""A call is obeyed only as the control plane has signed it: every change of any part of it is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.desired import Desired
from shoal_service.signing.calls import CallName, CallRefused, PullArguments, Refusal, SignedCall
from shoal_service.signing.gate import Gate, RefusedCalls, verified
from shoal_service.signing.signer import Signer, new_seed
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.spec import ElasticitySpec

SIGNER = Signer("11" * 32, "j1", 2, 5)
DIRECTIVE = Directive(
    epoch=5,
    number=3,
    granted=2,
    desired=Desired.RUN,
    elasticity=ElasticitySpec(min_workers=1, max_workers=4),
    parallelism="auto",
    spec_version=1,
)
ARGUMENTS = DIRECTIVE.model_dump(mode="json")
SIGNED = SIGNER.sign(CallName.DIRECT, ARGUMENTS)


def gate(public_key: str = SIGNER.public_key) -> Gate:
    return Gate(public_key, "j1", 2)


def refusal(signed: SignedCall, *, name: CallName = CallName.DIRECT, job_id: str = "j1", attempt: int = 2) -> Refusal:
    with pytest.raises(CallRefused) as error:
        verified(signed, SIGNER.public_key, job_id=job_id, attempt=attempt, name=name)
    assert error.value.call is name
    return error.value.refusal


def test_what_was_signed_is_what_is_read() -> None:
    assert gate().opened(SIGNED, CallName.DIRECT, Directive) == (5, DIRECTIVE)
    pull = SIGNER.sign(CallName.PULL, {"after": 7, "wait_s": 1.0})
    assert gate().opened(pull, CallName.PULL, PullArguments) == (5, PullArguments(after=7, wait_s=1.0))


VALUES = st.none() | st.booleans() | st.integers(-10, 1 << 40) | st.text(max_size=5) | st.floats(allow_nan=False)


@given(field=st.sampled_from(["job_id", "attempt", "epoch", "name"]), value=VALUES)
def test_no_field_of_a_call_can_be_changed(field: str, value: Any) -> None:
    call = json.loads(SIGNED.text)
    changed = json.dumps({**call, field: value}, separators=(",", ":"))
    if json.loads(changed) != call:
        assert refusal(SIGNED.model_copy(update={"text": changed})) is Refusal.FORGED


@given(field=st.sampled_from(sorted(ARGUMENTS)), value=VALUES)
def test_no_field_of_a_directive_can_be_changed_added_or_removed(field: str, value: Any) -> None:
    call = json.loads(SIGNED.text)
    without = {name: kept for name, kept in ARGUMENTS.items() if name != field}
    for arguments in ({**ARGUMENTS, field: value}, without, {**ARGUMENTS, f"{field}_": value}):
        if arguments != ARGUMENTS:
            changed = json.dumps({**call, "arguments": arguments}, separators=(",", ":"))
            assert refusal(SIGNED.model_copy(update={"text": changed})) is Refusal.FORGED


@given(position=st.integers(0, len(SIGNED.text) - 1), letter=st.characters(codec="utf-8"))
def test_no_letter_of_the_text_can_be_changed(position: int, letter: str) -> None:
    text = SIGNED.text[:position] + letter + SIGNED.text[position + 1 :]
    if text != SIGNED.text:
        assert refusal(SIGNED.model_copy(update={"text": text})) is Refusal.FORGED


@given(signature=st.text(max_size=200) | st.binary(min_size=64, max_size=64).map(bytes.hex))
def test_no_other_signature_fits(signature: str) -> None:
    if signature != SIGNED.signature:
        assert refusal(SIGNED.model_copy(update={"signature": signature})) is Refusal.FORGED


def test_a_text_that_is_not_utf_8_is_refused() -> None:
    assert refusal(SIGNED.model_copy(update={"text": "\ud800"})) is Refusal.FORGED


@pytest.mark.parametrize("signed", [None, "text", {}, SIGNED.model_copy(update={"signature": None, "text": 5})])
def test_what_is_no_signed_call_is_refused(signed: Any) -> None:
    assert refusal(signed) is Refusal.FORGED


def test_a_signature_by_another_key_is_refused() -> None:
    forged = Signer(new_seed(), "j1", 2, 5).sign(CallName.DIRECT, ARGUMENTS)
    assert refusal(forged) is Refusal.FORGED


def test_a_call_for_another_attempt_or_under_another_name_is_refused() -> None:
    assert refusal(SIGNED, job_id="j2") is Refusal.MISDIRECTED
    assert refusal(SIGNED, attempt=3) is Refusal.MISDIRECTED
    assert refusal(SIGNED, name=CallName.RELEASE) is Refusal.MISDIRECTED


@pytest.mark.parametrize("public_key", ["", "zz", "11" * 31])
def test_without_a_usable_key_no_signature_fits(public_key: str) -> None:
    with pytest.raises(CallRefused):
        gate(public_key).opened(SIGNED, CallName.DIRECT, Directive)


def test_unsigned_calls_are_only_those_of_attempts_that_began_without_a_key() -> None:
    gate("").require_no_key(CallName.PULL)
    with pytest.raises(CallRefused) as error:
        gate().require_no_key(CallName.PULL)
    assert error.value.refusal is Refusal.UNSIGNED


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=30))
def test_an_older_directive_is_never_obeyed_after_a_newer_one(sent: list[tuple[int, int]]) -> None:
    obeyed: list[tuple[int, int]] = []
    order = gate()
    for epoch, number in sent:
        try:
            order.require_order(epoch, number)
        except CallRefused as error:
            assert error.refusal is Refusal.REPLAYED and (epoch, number) < obeyed[-1]
        else:
            obeyed.append((epoch, number))
    assert obeyed == sorted(obeyed)


def test_a_newer_control_plane_may_add_fields() -> None:
    newer = {**ARGUMENTS, "colour": "green", "elasticity": {**ARGUMENTS["elasticity"], "grace_s": 1.0}}
    assert gate().opened(SIGNER.sign(CallName.DIRECT, newer), CallName.DIRECT, Directive) == (5, DIRECTIVE)


def test_a_flood_of_refused_calls_is_no_flood_of_events() -> None:
    refused = RefusedCalls()
    unsigned, forged = (CallRefused("direct", reason) for reason in ("unsigned", "forged"))
    assert refused.add(unsigned, 10.0) == 1
    assert [refused.add(unsigned, 10.0 + 0.01 * n) for n in range(100)] == [None] * 100
    assert refused.add(forged, 20.0) == 1, "another reason"
    assert refused.add(unsigned, 70.0) == 102


def test_a_refusal_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CallRefused("pull", "forged")))
    assert (error.call, error.refusal) == (CallName.PULL, Refusal.FORGED)
    assert str(error) == "the supervisor refuses the call pull: its signature does not fit the key of the attempt"
