"""What is remarked of the first samples of a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal_workers.contract.worker_reports import ValidationReport
from shoal_workers.engine.step.first_look import (
    is_same,
    remarks_on_batch,
    remarks_on_labels,
    remarks_on_validation,
)


@pytest.mark.parametrize(
    ("batch", "again", "same"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        ({"x": torch.ones(2), "name": "a"}, {"x": torch.ones(2), "name": "a"}, True),
        ({"x": torch.ones(2), "name": "a"}, {"x": torch.ones(2), "name": "b"}, False),
        ((np.ones(2), [torch.ones(1)]), (np.ones(2), [torch.ones(1)]), True),
        ((np.ones(2), [torch.ones(1)]), (np.ones(2), [torch.zeros(1)]), False),
        (torch.ones(2), torch.ones(3), False),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)], False),
        ({"f": lambda: 1, "x": torch.ones(1)}, {"f": lambda: 1, "x": torch.ones(1)}, True),
    ],
)
def test_batches_are_compared_by_all_their_values(batch: Any, again: Any, same: bool) -> None:
    assert is_same(batch, again) is same


def test_images_of_one_colour_are_remarked() -> None:
    white = torch.tensor([2.0, 2.1, 2.2]).view(1, 3, 1, 1).expand(4, 3, 8, 8)
    for batch in ({"pixels": white, "label": torch.arange(4)}, (white, torch.arange(4)), white):
        [remark] = remarks_on_batch(batch)
        assert "the first 4 samples of" in remark and "of one colour (the first pixel is [2.0, 2.0999999" in remark
    drawn = white.clone()
    drawn[3, 1, 5, 5] = 0
    assert list(remarks_on_batch({"pixels": drawn, "tokens": torch.zeros(4, 8)})) == []
    assert list(remarks_on_batch(torch.zeros(4, 3, 1, 1))) == [], "one pixel is always of one colour"


class _Labelled:
    def __init__(self, counts: dict[int, int]) -> None:
        self._counts = counts

    def label_counts(self) -> dict[int, int]:
        return self._counts


def test_a_split_with_a_single_label_is_remarked() -> None:
    assert list(remarks_on_labels(_Labelled({3: 1200}), "validation")) == [
        "all 1,200 examples of the validation split have the label 3."
    ]
    assert list(remarks_on_labels(_Labelled({3: 1200, 0: 1}), "training")) == []
    assert list(remarks_on_labels([1, 1], "training")) == list(remarks_on_labels(None, "validation")) == []


def test_an_accuracy_of_1_in_the_first_validation_is_remarked() -> None:
    report = ValidationReport(
        generation=1, step=2, at=0.0, loss=0.5, samples=256, bits_per_byte=None, metrics={"accuracy": 1.0, "f1": 1.0}
    )
    [remark] = remarks_on_validation(report, "f1")
    assert remark.startswith("accuracy is 1 in the first validation, after step 2, on 256 samples.")
    assert list(remarks_on_validation(report.model_copy(update={"metrics": {"accuracy": 0.999}}), "loss")) == []
    assert list(remarks_on_validation(report.model_copy(update={"metrics": {"f1": 0.9}}), "accuracy")) == [
        "validation.metric 'accuracy' is not in the first validation, which has loss, f1: it counts as no better."
    ]
