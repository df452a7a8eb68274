"""Tokens that people make for themselves: no more rights, no longer, no further ones, and whose they are."""

from dataclasses import replace

import pytest

from shoal_service.core.access import (
    MAX_OWN_TOKENS,
    PERMISSIONS,
    Principal,
    Refusal,
    Role,
    decide_grant,
    is_own,
    makes_own,
    refusal_of,
)

ADA = Principal(
    name="ada",
    role=Role.OPERATOR,
    projects=frozenset({"vision", "speech"}),
    user="ada",
    token_id="aaaaaaaa",
    expires_at=100.0,
    personal=True,
)
WISH = Principal(name="ci", role=Role.OPERATOR, expires_at=50.0)


def granted(principal: Principal, wish: Principal, num_valid: int = 0) -> Principal:
    found = decide_grant(principal, wish, num_valid)
    assert isinstance(found, Principal), found
    return found


def test_a_token_of_a_person_has_the_persons_user_and_projects_and_a_name_that_says_whose_it_is() -> None:
    made = granted(ADA, WISH)
    assert (made.name, made.user, made.projects, made.parent) == ("ada/ci", "ada", ADA.projects, "aaaaaaaa")
    assert made.expires_at == 50.0
    assert granted(ADA, replace(WISH, projects=frozenset({"vision"}))).projects == {"vision"}


@pytest.mark.parametrize(("asked", "ends_at"), [(50.0, 50.0), (500.0, 100.0), (None, 100.0)])
def test_it_ends_with_the_token_that_made_it(asked: float | None, ends_at: float) -> None:
    assert granted(ADA, replace(WISH, expires_at=asked)).expires_at == ends_at
    assert granted(replace(ADA, expires_at=None), replace(WISH, expires_at=None)).expires_at is None


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("wished", Role)
def test_it_may_do_nothing_that_its_maker_may_not(role: Role, wished: Role) -> None:
    maker = replace(ADA, role=role)
    made = decide_grant(maker, replace(WISH, role=wished), 0)
    if not isinstance(made, Refusal):
        child = replace(made, token_id="bbbbbbbb")
        for permission in PERMISSIONS:
            if refusal_of(child, permission) is None:
                assert refusal_of(maker, permission) is None, permission
        assert not makes_own(child)
    assert isinstance(made, Refusal) == (
        role in (Role.GATEWAY, Role.SCRAPER)
        or wished is Role.GATEWAY
        or list(Role).index(wished) > list(Role).index(role)
    )


@pytest.mark.parametrize(
    ("principal", "wish", "word"),
    [
        (replace(ADA, personal=False), WISH, "made for a program"),
        (ADA, replace(WISH, projects=frozenset({"vision", "biology"})), "biology"),
        (ADA, replace(WISH, user="eve"), "user is 'eve'"),
        (ADA, replace(WISH, personal=True), "personal is true"),
        (ADA, replace(WISH, name="x" * 60), "at most 59 fit"),
    ],
)
def test_what_a_person_may_not_give_is_refused_with_its_setting(
    principal: Principal, wish: Principal, word: str
) -> None:
    found = decide_grant(principal, wish, 0)
    assert isinstance(found, Refusal) and word in found.reason


def test_a_person_has_so_many_valid_tokens_and_no_more() -> None:
    granted(ADA, WISH, MAX_OWN_TOKENS - 1)
    found = decide_grant(ADA, WISH, MAX_OWN_TOKENS)
    assert isinstance(found, Refusal) and "revoke one first" in found.reason


def test_a_jwt_is_a_persons_and_its_tokens_end_when_it_does() -> None:
    person = replace(ADA, token_id="", personal=False)
    made = granted(person, replace(WISH, expires_at=None))
    assert (made.parent, made.expires_at) == ("", 100.0)


def test_a_person_sees_tokens_of_the_same_user_that_may_do_no_more_and_a_program_only_its_own() -> None:
    program = replace(ADA, personal=False, token_id="cccccccc")
    of_user = Principal(
        name="t", token_id="dddddddd", parent="", user="ada", role=Role.VIEWER, projects=frozenset({"vision"})
    )
    assert is_own(ADA, of_user) and not is_own(program, of_user)
    itself = Principal(name="t", token_id="cccccccc", parent="", user="ada", role=Role.OPERATOR, projects=ADA.projects)
    assert is_own(program, itself)
    for stronger in (replace(of_user, role=Role.ADMIN), replace(of_user, projects=None), replace(of_user, user="eve")):
        assert not is_own(ADA, stronger)
    child = Principal(
        name="t", token_id="eeeeeeee", parent="aaaaaaaa", user="ada", role=Role.VIEWER, projects=ADA.projects
    )
    assert is_own(ADA, child) and not is_own(replace(program, token_id="eeeeeeee"), replace(child, token_id="aaaaaaaa"))
    admin = Principal("root", Role.ADMIN, token_id="ffffffff")
    assert not is_own(admin, replace(of_user, user="")), "an empty user is nobody's"
