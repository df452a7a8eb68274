"""What a person reads when new code builds another model."""

from __future__ import annotations

from shoal_workers.contract.model.shape import ModelShape, difference

TRAINED = ModelShape(tensors={"a.weight": "float32 [2, 3]", "a.bias": "float32 [2]", "b": "float32 [1]"})


def test_equal_models_have_no_difference() -> None:
    assert difference(TRAINED, TRAINED) == ""


def test_the_first_tensors_that_differ_are_named() -> None:
    other = ModelShape(tensors={"a.weight": "float32 [4, 3]", "a.bias": "float16 [2]", "c": "float32 [1]"})
    assert difference(TRAINED, other) == (
        "its model does not fit the state of the one that trains: a.weight is float32 [4, 3] and was float32 [2, 3]; "
        "a.bias is float16 [2] and was float32 [2]; b (float32 [1]) is gone; and 1 more"
    )
