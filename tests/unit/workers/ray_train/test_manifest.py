"""The list of a run's checkpoints: what is kept, and what is read back."""

import math

import pytest

from shoal_workers.ray_train.manifest import Manifest, Retention


def _reported(losses: list[float | None], retention: Retention) -> tuple[Manifest, list[str]]:
    """After reports with a checkpoint each; None: a report without one."""
    manifest, dropped = Manifest(), []
    for number, loss in enumerate(losses):
        name = None if loss is None else f"c{number}"
        manifest, names = manifest.with_report(retention, name, {"loss": loss, "eval": {"loss": loss}})
        dropped += names
    return manifest, dropped


def _names(manifest: Manifest) -> list[str]:
    return [one.name for one in manifest.kept]


def test_without_a_limit_all_are_kept_in_their_order() -> None:
    manifest, dropped = _reported([3.0, None, 1.0, 2.0], Retention())
    assert (_names(manifest), dropped) == (["c0", "c2", "c3"], [])
    assert manifest.newest is not None and manifest.newest.name == "c3"
    assert (manifest.next_index, [one.index for one in manifest.kept]) == (4, [0, 2, 3])


def test_the_newest_are_kept() -> None:
    manifest, dropped = _reported([3.0, 1.0, 2.0, 4.0], Retention(num_to_keep=2))
    assert (_names(manifest), dropped) == (["c2", "c3"], ["c0", "c1"])


@pytest.mark.parametrize("attribute", ["loss", "eval/loss"])
def test_the_best_are_kept_and_the_newest_whatever_its_score(attribute: str) -> None:
    manifest, dropped = _reported([1.0, 3.0, 2.0, 4.0], Retention(2, attribute, "min"))
    assert (_names(manifest), dropped) == (["c3", "c2", "c0"], ["c1"]), "the worst first"
    later, names = manifest.with_report(Retention(2, attribute, "min"), "c4", {"loss": 1.5, "eval": {"loss": 1.5}})
    assert (_names(later), names) == (["c4", "c0"], ["c3", "c2"])


@pytest.mark.parametrize("loss", [math.nan, "none"])
def test_what_is_no_number_is_worse_than_any(loss: float | str) -> None:
    manifest, _ = Manifest().with_report(Retention(1, "loss"), "c0", {"loss": loss})
    manifest, _ = manifest.with_report(Retention(1, "loss"), "c1", {"loss": -1e9})
    assert _names(manifest) == ["c1"]


def test_a_list_is_what_was_written() -> None:
    manifest, _ = _reported([3.0, None, 1.0], Retention())
    assert Manifest.from_text(manifest.to_text("2.60.0")) == manifest
    assert Manifest.from_text(Manifest().to_text("2.60.0")) == Manifest()
