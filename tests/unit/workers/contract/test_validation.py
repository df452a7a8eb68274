"""How validations are judged: the best ones, and when a job stops early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import ValidationSpec
from shoal_workers.contract.validation import Standing, is_exhausted, judge, why_exhausted


def _fold(rule: ValidationSpec, values: list[float], keep: int = 0) -> Standing:
    standing = None
    for number, value in enumerate(values, 1):
        standing = judge(standing, rule, keep, step=10 * number, loss=value, metrics={})
    assert standing is not None
    return standing


def test_a_job_stops_after_patience_validations_without_an_improvement() -> None:
    rule = ValidationSpec(patience=3, min_delta=0.1)
    assert not is_exhausted(_fold(rule, [3.1, 2.7, 2.8, 2.65]), rule)
    standing = _fold(rule, [3.1, 2.7, 2.8, 2.65, 2.68])
    assert is_exhausted(standing, rule)
    assert standing.best[0].step == 40, "an improvement that is too small for patience is one all the same"
    assert "did not improve by 0.1 on 2.7 in 3 validations" in why_exhausted(standing, rule)
    assert not is_exhausted(standing, ValidationSpec())


def test_a_larger_metric_of_the_tasks_own_is_better_if_the_spec_says_so() -> None:
    rule = ValidationSpec(metric="accuracy", mode="max")
    standing = judge(None, rule, 2, step=1, loss=1.0, metrics={"accuracy": 0.5})
    standing = judge(standing, rule, 2, step=2, loss=0.5, metrics={"accuracy": 0.4})
    standing = judge(standing, rule, 2, step=3, loss=0.4, metrics={"accuracy": 0.7})
    assert standing.kept_steps == (3, 1)
    assert judge(standing, rule, 2, step=4, loss=0.1, metrics={}) == standing, "it does not have the metric"


_MODES = {
    "min": "loss val_loss perplexity ppl error_rate word_error wer eval/cer rmse mae accuracy_loss nll bits_per_byte "
    "brier_score fid",
    "max": "accuracy top5_accuracy eval/acc f1 macro_f1 f1_score auc val_auroc mAP50 mean_iou bleu rouge2 rougeL r2 "
    "psnr rewards/accuracies rewards/margins exact_match pass@1 win_rate recall@10",
}


def test_a_metric_without_a_mode_is_better_as_its_name_says() -> None:
    names = {name: mode for mode, names in _MODES.items() for name in names.split()}
    assert {name: ValidationSpec(metric=name).better for name in names} == names
    assert ValidationSpec(metric="accuracy", mode="min").better == "min", "what is said holds"
    standing = None
    for step, value in enumerate((0.5, 0.9, 0.7), 1):
        standing = judge(
            standing, ValidationSpec(metric="accuracy"), 1, step=step, loss=1.0, metrics={"accuracy": value}
        )
    assert standing is not None and standing.kept_steps == (2,)


def test_a_metric_whose_name_does_not_say_what_is_better_needs_a_mode() -> None:
    spec = {"task": "a:B", "stop": {"steps": 1}, "validation": {"metric": "true_positive_rate"}}
    with pytest.raises(SpecError, match=r"'true_positive_rate' does not say .* Set validation\.mode to min or max"):
        parse_spec(spec)
    spec["validation"] = {"metric": "true_positive_rate", "mode": "max"}
    assert parse_spec(spec).validation.better == "max"


def test_another_metric_begins_anew() -> None:
    standing = _fold(ValidationSpec(), [3.0, 2.0])
    other = judge(standing, ValidationSpec(metric="f1", mode="max"), 0, step=30, loss=1.0, metrics={"f1": 0.1})
    assert [score.step for score in other.best] == [30] and other.num_since == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 5))
def test_the_best_are_the_best_of_all_and_a_repeated_validation_changes_nothing(values: list[float], keep: int) -> None:
    standing = _fold(ValidationSpec(), values, keep)
    expected = sorted(zip(values, range(10, 10 * len(values) + 10, 10), strict=True))[: max(1, keep)]
    assert [(score.value, score.step) for score in standing.best] == expected
    again = judge(standing, ValidationSpec(), keep, step=10 * len(values), loss=-1e9, metrics={})
    assert again == standing
