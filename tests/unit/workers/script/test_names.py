"""Which of the numbers that libraries log are the loss, the learning rate and the gradient norm."""

from typing import Any

import pytest

from shoal.names import sorted_out
from shoal_workers.contract.worker_reports import is_metric_name


@pytest.mark.parametrize(
    ("logged", "known", "others"),
    [
        (
            {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 3.0, "epoch": 4.0},
            {"loss": 1.0, "grad_norm": 2.0, "lr": 3.0},
            {"epoch": 4.0},
        ),
        ({"eval_loss": 1.0, "eval_runtime": 2.0, "eval_samples_per_second": 3.0}, {}, {"eval_loss": 1.0}),
        ({"train/train_loss": 1.0, "train/train_runtime": 2.0, "train/total_flos": 3.0}, {}, {}),
        ({"Loss/train": 1.0, "Loss/test": 2.0}, {"loss": 1.0}, {"Loss/test": 2.0}),
        ({"val/loss": 1.0, "train/loss": 2.0}, {"loss": 2.0}, {"val/loss": 1.0}),
        ({"kl_loss": 1.0, "train_loss": 2.0}, {"loss": 2.0}, {"kl_loss": 1.0}),
        ({"d_loss": 1.0, "g_loss": 2.0}, {"loss": 1.0}, {"g_loss": 2.0}),
        ({"lr-AdamW": 1.0, "lr-SGD": 2.0}, {"lr": 1.0}, {"lr-SGD": 2.0}),
        ({"train_loss_step": 1.0, "train_loss_epoch": 2.0}, {"loss": 1.0}, {"train_loss_epoch": 2.0}),
        ({"top 5": 1.0, "5": 2.0, "a" * 60: 3.0}, {}, {"top_5": 1.0, "a" * 40: 3.0}),
    ],
)
def test_names_of_libraries_are_known(logged: dict[str, Any], known: dict[str, Any], others: dict[str, Any]) -> None:
    assert sorted_out(logged) == (known, others)
    assert all(map(is_metric_name, others))
