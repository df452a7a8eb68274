"""Which names of a loop a loss is computed from and are read before they are assigned."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_workers.engine.loop.loss_names import read_by_loss, read_by_result

ALWAYS = {"float", "run", "run.batches", "model", "x", "y", "criterion", "loss", "len"}
LOOPS = {
    "number": ("        loss = criterion(model(x), y) * number\n        number = 0.9 * loss\n", {"number"}),
    "logged": ("        loss = criterion(model(x), y)\n        number = number + float(loss)\n", set()),
    "anew": ("        number = float(x)\n        loss = criterion(model(x), y) * number\n", set()),
    "either": (
        "        if x:\n            n = 1\n        else:\n            n = 2\n        loss = model(x) * n\n",
        set(),
    ),
    "one_branch": ("        if x:\n            number = 1\n        loss = model(x) * number\n", {"number"}),
    "condition": ("        loss = model(x)\n        if kept.count > 5:\n            loss = loss / 2\n", {"kept.count"}),
    "rate": ("        loss = model(x)\n        optimizer.param_groups[0]['lr'] = rate\n", {"rate"}),
    "inner": ("        for one in x:\n            loss = model(one)\n", set()),
    "subscript": ("        rows[0] = x\n        loss = model(x) * rows[0]\n", {"rows"}),
    "pair": ("        hidden, loss = model(x, hidden)\n", {"hidden"}),
    "with": ("        with autocast() as number:\n            loss = model(x) * number\n", {"autocast"}),
    "left": (
        "        if x:\n            break\n        else:\n            n = 1\n        loss = model(x) * n\n",
        set(),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_names_that_carry_something_into_a_loss_are_read_before_they_are_assigned(tmp_path: Path, name: str) -> None:
    body, expected = LOOPS[name]
    text = f"def train(run):\n    number = 0\n    for x, y in run.batches(data):\n{body}        run.backward(loss)\n"
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    found, has_loop, _ = read_by_loss(str(file), 1, text.count("\n"))
    assert (set(found) - ALWAYS, has_loop) == (expected, True)


def test_a_function_that_is_called_by_a_loop_has_its_arguments_of_it(tmp_path: Path) -> None:
    file = tmp_path / "helper.py"
    lines = ["def step(run, model, x):", "    model.step = run.step", "    model.rate = model.rate / 2"]
    lines += ["    made = model(x) * scale", "    run.backward(made)", "    return kept.value"]
    file.write_text("\n".join(lines))
    assert read_by_loss(str(file), 1, 5) == ({"scale": 4}, False, {"step"})
    assert read_by_result(str(file), 1) == {"kept.value": 6}


def test_a_file_that_cannot_be_read_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def train(:")
    assert read_by_loss(str(tmp_path / "broken.py"), 1, 1) == ({}, True, set())
    assert read_by_loss(str(tmp_path / "missing.py"), 1, 1) == ({}, True, set())
