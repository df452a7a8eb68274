"""A mixture has exactly the shares of its spec, everywhere, and its order follows from the seed and the position."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal_workers.contract.mixture_weights import InForce
from shoal_workers.contract.text_data import TextDataConfig, TextSource
from shoal_workers.data.errors import CorpusTooSmallError, MissingTextError
from shoal_workers.data.mixture import Interleaving, Mixture, MixtureOrder, find_shares
from shoal_workers.data.tokenizer import Split, choose_split
from shoal_workers.engine.sample_order import training_order
from shoal_workers.tasks.text import TextTask

SEQ_LEN = 16
SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)


@settings(max_examples=40)
@given(shares=SHARES, start=st.integers(0, 10**12))
def test_every_window_of_a_period_has_the_shares_exactly(shares: list[int], start: int) -> None:
    order = Interleaving(shares)
    found = [order.at(position) for position in range(start, start + order.period)]
    counts = Counter(source for source, _ in found)
    assert [counts[source] for source in range(len(shares))] == shares
    before, after = order.counts(start), order.counts(start + order.period)
    for source, share in enumerate(shares):
        assert after[source] - before[source] == share
        assert [n for s, n in found if s == source] == list(range(before[source], after[source]))  # each number once


@settings(max_examples=40)
@given(shares=SHARES, position=st.integers(0, 10**9), num=st.integers(1, 200))
def test_a_shorter_window_is_close_to_the_shares(shares: list[int], position: int, num: int) -> None:
    order = Interleaving(shares)
    before, after = order.counts(position), order.counts(position + num)
    for source, share in enumerate(shares):
        assert abs(after[source] - before[source] - num * share / order.period) < 3


def test_the_order_is_this_one_for_ever() -> None:
    order = Interleaving([7, 2, 1])
    assert "".join("abc"[order.at(position)[0]] for position in range(20)) == "abaaacaabaabaaacaaba"
    assert order.at(10**18) == (0, 7 * 10**17)


CHANGES = st.lists(st.tuples(st.integers(1, 300), SHARES), max_size=4, unique_by=lambda one: one[0]).map(sorted)


@settings(max_examples=40)
@given(num=st.integers(1, 6), changes=CHANGES, data=st.data())
def test_shares_that_change_leave_out_no_sample_of_a_source(
    num: int, changes: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    shares = [data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num).filter(any)) for _ in range(5)]
    segments = [(0, shares[0]), *((first, more) for (first, _), more in zip(changes, shares[1:], strict=False))]
    order = MixtureOrder(shares[0], segments[1:])
    reached = [0] * num
    for position in range(400):
        source, number = order.at(position)
        assert number == reached[source], "each source goes on where it was left"
        reached[source] += 1
        assert order.counts(position + 1) == reached
    for (first, now), (end, _) in itertools.pairwise([*segments, (400, [])]):
        alone = [Interleaving(now).at(position)[0] for position in range(end - first)]
        assert [order.at(position)[0] for position in range(first, end)] == alone


def test_the_order_with_changes_is_this_one_for_ever() -> None:
    order = MixtureOrder([7, 2, 1], [(5, [1, 1, 0]), (11, [0, 1, 3])])
    assert "".join("abc"[order.at(position)[0]] for position in range(20)) == "abaaabababaccbcccbcc"
    assert order.at(10**18) == (2, 749_999_999_999_999_992)


def _sources(**settings: Any) -> list[TextSource]:
    [(key, values)] = settings.items()
    return [TextSource(path=str(number), **{key: value}) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("sources", "sizes", "shares"),
    [
        (_sources(weight=[0.7, 0.2, 0.1]), [5, 5, 5], [7, 2, 1]),
        (_sources(weight=[3, 1]), [9, 1], [3, 1]),
        (_sources(weight=[1e-6, 1]), [9, 1], [1, 1_000_000]),
        (_sources(epochs=[1, 1]), [6, 9], [2, 3]),
        (_sources(epochs=[0.5, 2, 1]), [10, 3, 4], [5, 6, 4]),
    ],
)
def test_shares_are_exact(sources: list[TextSource], sizes: list[int], shares: list[int]) -> None:
    assert find_shares(sources, sizes) == shares


@pytest.fixture
def task_of(tmp_path: Path) -> Callable[..., TextTask]:
    """Three sources, of the letters a, b and c, of 60, 40 and 20 samples, and the data of a task."""
    for letter, num_samples in (("a", 60), ("b", 40), ("c", 20)):
        (tmp_path / f"{letter}.txt").write_text(letter * (num_samples * SEQ_LEN))

    def make(**settings: Any) -> TextTask:
        [(key, values)] = settings.items()
        sources = [
            {"path": str(tmp_path / f"{letter}.txt"), key: value} for letter, value in zip("abc", values, strict=True)
        ]
        data = {"sources": sources, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0}
        return TextTask(TextDataConfig.model_validate(data), SEQ_LEN)

    return make


def _letters(data: Any, positions: range, seed: int = 3) -> str:
    return "".join(chr(int(data[index][0])) for index in training_order(data, positions, seed=seed))


def test_each_source_is_read_whole_before_it_is_read_again(task_of: Callable[..., TextTask]) -> None:
    data = task_of(weight=[0.5, 0.25, 0.25]).build_dataset("train")
    assert isinstance(data, Mixture)
    assert len(data) == 120
    indices = training_order(data, range(400), seed=3)
    of_a = [index for index in indices if index < 60]
    assert len(of_a) == 200
    for epoch in range(3):
        assert sorted(of_a[60 * epoch : 60 * epoch + 60]) == list(range(60))
    assert of_a[:60] != of_a[60:120] != sorted(of_a[60:120])
    assert Counter(_letters(data, range(400))) == {"a": 200, "b": 100, "c": 100}


def test_epochs_of_sources_are_met_in_one_epoch_of_the_mixture(task_of: Callable[..., TextTask]) -> None:
    data = task_of(epochs=[1, 0.5, 2]).build_dataset("train")
    period = 60 + 20 + 40
    counts = Counter(training_order(data, range(period), seed=3))
    assert [counts[index] for index in range(60)] == [1] * 60
    assert sorted(counts[index] for index in range(60, 100)) == [0] * 20 + [1] * 20
    assert [counts[index] for index in range(100, 120)] == [2] * 20
    assert len(data) == period


def test_other_weights_prepare_nothing_again_and_are_other_data(
    task_of: Callable[..., TextTask], tmp_path: Path
) -> None:
    first = task_of(weight=[1, 1, 1]).build_dataset("train")
    directories = sorted((tmp_path / "cache").iterdir())
    second = task_of(weight=[2, 1, 1]).build_dataset("train")
    assert sorted((tmp_path / "cache").iterdir()) == directories
    assert first.content_hash != second.content_hash
    assert first.content_hash == task_of(weight=[5, 5, 5]).build_dataset("train").content_hash


def test_changed_weights_are_the_same_data_in_an_order_that_goes_on(task_of: Callable[..., TextTask]) -> None:
    data = task_of(weight=[1, 1, 2]).build_dataset("train")
    assert isinstance(data, Mixture)
    before, content_hash = training_order(data, range(400), seed=3), data.content_hash
    data.change_weights((InForce(6, (0.5, 0.0, 0.5)), InForce(11, (0.0, 1.0, 0.0))), 8)  # from samples 40 and 80 on
    found = training_order(data, range(120), seed=3)
    assert data.content_hash == content_hash
    assert found[:40] == before[:40]
    assert Counter(_letters(data, range(40, 80))) == {"a": 20, "c": 20}
    assert Counter(_letters(data, range(80, 120))) == {"b": 40}
    for source in (range(60), range(60, 100), range(100, 120)):  # in the order that it has under any weights
        own = [index for index in found if index in source]
        assert own == [index for index in before if index in source][: len(own)]
    data.change_weights((InForce(6, None),), 8)
    assert Counter(_letters(data, range(40, 80))) == {"a": 10, "b": 10, "c": 20}


def test_another_seed_is_another_order_of_the_same_shares(task_of: Callable[..., TextTask]) -> None:
    data = task_of(weight=[1, 1, 2]).build_dataset("train")
    one, other = (training_order(data, range(60), seed=seed) for seed in (1, 2))
    assert one != other
    assert _letters(data, range(60), 1) == _letters(data, range(60), 2)


def test_validation_has_the_shares_too_and_each_sample_once(tmp_path: Path) -> None:
    for letter, num_documents in (("a", 200), ("b", 100), ("c", 9)):
        texts = ["".join(f"{letter}{10 * n + part:07d}" for part in range(5)) for n in range(num_documents)]
        if letter == "c":
            texts = [text for text in texts if choose_split(text.encode(), 0.4) is Split.TRAIN]
        rows = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (tmp_path / f"{letter}.jsonl").write_text(rows)
    weights = {"a": 3, "b": 1, "c": 1}
    sources = [{"path": str(tmp_path / f"{letter}.jsonl"), "weight": weight} for letter, weight in weights.items()]
    data = {"sources": sources, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.4}
    task = TextTask(TextDataConfig.model_validate(data), 8)
    found = task.build_dataset("validation")
    samples = [tuple(found[index].tolist()) for index in range(len(found))]
    counts = Counter(next(chr(token) for token in sample if 97 <= token <= 99) for sample in samples)
    assert counts["c"] == 0
    assert counts["a"] == pytest.approx(3 * counts["b"], abs=3)
    assert len(set(samples)) == len(samples) > 300
    with pytest.raises(IndexError):
        found[len(found)]


def test_an_error_names_the_source(task_of: Callable[..., TextTask], tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(CorpusTooSmallError, match=r"data\.sources\[1\] \(.*b\.txt\): the training text has"):
        task_of(weight=[1, 1, 1]).build_dataset("train")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(MissingTextError, match=r"data\.sources\[1\]"):
        task_of(weight=[1, 1, 1]).build_dataset("train")


@pytest.mark.parametrize(
    "data",
    [
        {"sources": [{"path": "a"}]},
        {"sources": [{"path": "a", "weight": 1, "epochs": 1}]},
        {"sources": [{"path": "a", "weight": 1}, {"path": "b", "epochs": 1}]},
        {"sources": [{"path": "a", "weight": 0}]},
        {"sources": [{"path": "a", "weight": 1}], "paths": ["b"]},
    ],
)
def test_sources_have_all_weights_or_all_epochs_and_stand_alone(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TextDataConfig.model_validate(data)


def test_progress_says_which_source_it_is(task_of: Callable[..., TextTask]) -> None:
    said: list[str] = []
    task_of(weight=[1, 1, 1]).prepare(said.append)
    assert said[-1] == "source 3 of 3: text ready"
