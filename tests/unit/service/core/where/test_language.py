"""Every form of the language of conditions, and what is refused: with the place, and what may stand there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.plain_conditions import label_number
from shoal_service.core.where.fields import FACTS, Kind, UnknownName, all_names, field_named, setting_kinds
from shoal_service.core.where.language import (
    MAX_LENGTH,
    AllOf,
    AnyOf,
    Compared,
    InvalidCondition,
    IsSet,
    Not,
    Order,
    Relation,
    Selection,
    parse,
    parse_columns,
    parse_order,
)

NOW = 1_800_000_000.0
LOSS, STATE, TEAM = FACTS["loss"], FACTS["state"], field_named(("label", "team"))
LR = field_named(("optimizer", "lr"))


def test_the_condition_of_the_manual_is_its_three_comparisons() -> None:
    short = field_named(("lr",))
    assert parse('lr > 1e-3 and state == "FAILED" and label.team == "speech"', NOW) == AllOf(
        (
            Compared(short, Relation.MORE, 1e-3),
            Compared(STATE, Relation.EQUAL, "FAILED"),
            Compared(TEAM, Relation.EQUAL, "speech"),
        )
    )
    assert (short.path, short.source) == (LR.path, LR.source)


@pytest.mark.parametrize(
    ("text", "relation", "literal"),
    [
        ("loss < 3", Relation.LESS, 3.0),
        ("loss <= -.5", Relation.AT_MOST, -0.5),
        ("loss>=+1E-2", Relation.AT_LEAST, 0.01),
        ("loss = 2", Relation.EQUAL, 2.0),
        ("loss == null", Relation.EQUAL, None),
        ("eta_s < 2h", Relation.LESS, 7200.0),
        ("created > now", Relation.MORE, NOW),
        ("created > now-7d", Relation.MORE, NOW - 7 * 86400),
        ("created < now + 1.5w", Relation.LESS, NOW + 1.5 * 7 * 86400),
        ("ended >= 2026-11-20", Relation.AT_LEAST, 1795132800.0),
        ("ended >= 2026-11-20T08:00", Relation.AT_LEAST, 1795132800.0 + 8 * 3600),
        ('ended >= "2026-11-20T08:00:00+02:00"', Relation.AT_LEAST, 1795132800.0 + 6 * 3600),
        ("started > 1795132800", Relation.MORE, 1795132800.0),
        ("state == 'failed'", Relation.EQUAL, "FAILED"),
        ("name ~ 'it\\'s'", Relation.CONTAINS, "it's"),
        ('name CONTAINS "a b"', Relation.CONTAINS, "a b"),
        ("label.lr > 3e-4", Relation.MORE, 3e-4),
        ("deterministic == TRUE", Relation.EQUAL, True),
        ("archived == false", Relation.EQUAL, False),
        ("model.dim == 64", Relation.EQUAL, 64.0),
        ('model.act == "gelu"', Relation.EQUAL, "gelu"),
    ],
)
def test_a_comparison_has_a_name_a_relation_and_a_literal(
    text: str, relation: Relation, literal: str | float | bool | None
) -> None:
    found = parse(text, NOW)
    assert isinstance(found, Compared)
    assert (found.relation, found.literal) == (relation, literal)


def test_and_binds_more_than_or_and_not_more_than_and() -> None:
    loss, ended = IsSet(LOSS), IsSet(FACTS["ended"])
    assert parse("loss or not ended and loss", NOW) == AnyOf((loss, AllOf((Not(ended), loss))))
    assert parse("loss || ! ended && loss", NOW) == AnyOf((loss, AllOf((Not(ended), loss))))
    assert parse("not (loss or ended)", NOW) == Not(AnyOf((loss, ended)))


def test_a_list_is_one_of_its_values_and_unequal_is_the_opposite_of_equal() -> None:
    either = AnyOf(tuple(Compared(STATE, Relation.EQUAL, one) for one in ("FAILED", "CANCELLED")))
    assert parse('state in ("FAILED", "cancelled")', NOW) == either
    assert parse('state not in ["FAILED", "CANCELLED"]', NOW) == Not(either)
    assert parse("loss != 3", NOW) == Not(Compared(LOSS, Relation.EQUAL, 3.0))


def test_names_that_users_have_chosen_may_have_dots_and_signs() -> None:
    assert field_named(("label", "team.of-one")).path == ("team.of-one",)
    [dotted] = parse_columns("label.team.of-one")
    [quoted] = parse_columns('metric."eval acc"')
    [slashed] = parse_columns("val.eval/acc")
    paths = [dotted.path, quoted.path, slashed.path]
    assert paths == [("team.of-one",), ("metrics", "eval acc"), ("val_metrics", "eval/acc")]


def test_an_empty_text_selects_all() -> None:
    assert [parse(text, NOW) for text in ("", "  \n")] == [None, None]
    assert parse_order(" ") == () and parse_columns("") == ()


def test_an_order_is_a_list_of_names_and_a_dash_reverses() -> None:
    assert parse_order("-loss, created") == (Order(LOSS, True), Order(FACTS["created"], False))


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("los < 3", 0, "there is no 'los'; near it are loss"),
        ("loss < 3 and zzz", 13, "label.NAME"),
        ("steps > 3", 0, "several settings: write schedule.steps or stop.steps"),
        ("loss <", 6, "the text ends here"),
        ("loss < 3 4", 9, "expected `and`, `or`, or the end; found 4"),
        ("(loss < 3", 0, "has no ) that closes it"),
        ("loss < 3)", 8, "expected `and`, `or`, or the end; found )"),
        ('loss < "x"', 7, "loss is a number: it is not compared with"),
        ("loss ~ 3", 5, "it has no ~"),
        ("name ~ 3", 7, "~ needs a text in quotes"),
        ("name < null", 7, "name is a text: it is not compared with null"),
        ("state == FAILED", 9, 'text needs quotes: "FAILED"'),
        ('state == "FAILD"', 9, "use one of QUEUED"),
        ('state < "FAILED"', 6, "it has no <"),
        ("deterministic > true", 14, "it has no >"),
        ("created > 7x", 10, "use s, m, h, d, w"),
        ('created > "soon"', 10, "write 2026-11-20"),
        ("created > 2026-13-40", 10, "write 2026-11-20"),
        ("1 < loss", 0, "expected a name"),
        ("loss not 3", 9, "expected `in`"),
        ("state in 'FAILED'", 9, "expected a list"),
        ("state in ('FAILED' 'CANCELLED')", 19, "expected , or )"),
        ('name == "a', 8, "no quote that closes it"),
        ("loss < 3 ; x", 9, "';' has no meaning"),
        ("loss\x00< 3", 4, "has no meaning"),
        ("loss < 1e999", 7, "too large"),
        ("loss and and", 9, "expected a name"),
        ("(" * 50 + "loss" + ")" * 50, 41, "inside each other"),
        (" or ".join(["loss"] * 70), 512, "more than 64 comparisons"),
    ],
)
def test_a_mistake_is_named_at_its_place(text: str, at: int, words: str) -> None:
    with pytest.raises(InvalidCondition) as error:
        parse(text, NOW)
    assert error.value.at == at
    message, shown, marks = str(error.value).split("\n")
    assert words in message
    assert shown[marks.index("^") :][:1] == text.replace("\x00", " ")[at : at + 1]


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidCondition, match=f"more than {MAX_LENGTH} letters"):
        parse("loss or " * 1000, NOW)


@given(st.text(max_size=60) | st.text(alphabet="loss<>=!~() and or not in \"'.,0e-7d", max_size=60))
def test_every_text_is_a_condition_or_is_refused(text: str) -> None:
    try:
        parse(text, NOW)
    except InvalidCondition as error:
        assert 0 <= error.at <= len(text) and len(str(error).split("\n")) == 3, str(error)


@given(st.lists(st.sampled_from(sorted({*all_names(), "nothing", "-loss", "label.x", ""})), max_size=6))
def test_every_list_of_names_is_an_order_or_is_refused_at_a_name(names: list[str]) -> None:
    text = ", ".join(names)
    try:
        assert len(parse_order(text)) <= 4
    except InvalidCondition as error:
        assert text[error.at : error.at + error.length].strip(" -") in {*names, text, ""}


def test_every_setting_has_a_name_and_a_kind() -> None:
    kinds = setting_kinds()
    assert all(field_named(path).kind in (kinds[path], FACTS.get(".".join(path), LR).kind) for path in kinds)
    assert kinds["optimizer", "lr"] is Kind.NUMBER and kinds["compile",] is Kind.SWITCH
    assert kinds["finish_by",] is Kind.TIME and kinds["precision",] is Kind.TEXT
    with pytest.raises(UnknownName, match="near it are"):
        field_named(("optimiser", "lr"))


def test_archived_jobs_are_hidden_unless_the_condition_names_them() -> None:
    hides = [
        Selection.parse(text, with_archived=shown, now=NOW).hides_archived
        for text, shown in [("", False), ("loss < 3", False), ("", True), ("loss and not archived", False)]
    ]
    assert hides == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "number"),
    [("3e-4", 3e-4), ("-1", -1.0), ("007", 7.0), ("1.", None), (".5", None), ("1e999", None), ("", None), ("1 ", None)],
)
def test_a_label_is_a_number_if_both_databases_read_it_as_one(text: str, number: float | None) -> None:
    assert label_number(text) == number
