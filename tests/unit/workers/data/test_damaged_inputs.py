"""Every format with every damage: read whole, or refused with the file, or rows are left out and counted."""

from pathlib import Path

import pytest

pytest.importorskip("PIL.Image")

from kit.worlds.damaged_inputs import FORMATS, REFUSED_WHOLE, Outcome, readings


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize("every", [1000, pytest.param(37, marks=pytest.mark.matrix)])
def test_damaged_inputs_are_read_whole_or_refused_with_the_file_or_left_out_and_counted(
    tmp_path: Path, every: int
) -> None:
    failing = []
    for number, name in enumerate(FORMATS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for kind, which, bad_rows, outcome, message in readings(name, folder, every):
            undamaged = Outcome.REFUSED if name in REFUSED_WHOLE else Outcome.WHOLE
            if outcome is Outcome.WRONG or (kind == "none" and outcome is not undamaged):
                failing.append((name, which, bad_rows, outcome, message))
    assert failing == []
