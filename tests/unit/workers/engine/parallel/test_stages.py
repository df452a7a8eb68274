"""A model goes through its stages, one after the other in this process, as it does whole; what cannot is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kit.tasks.stage_tasks import LENGTH, PLAN, VOCABULARY, WIDTH, Sequences, Staged
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.stages import Handover, all_stages
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.task.returned import Returned, read_returned


@pytest.fixture(autouse=True)
def _same_generators_afterwards() -> Iterator[None]:
    states = generator_states()
    yield
    set_generator_states(states)


class Split:
    """A task and its model in stages."""

    def __init__(self, kind: str, pp: int, **plan: Any) -> None:
        self.task = Staged({"kind": kind}, {}, 3)
        seed_everything(5)
        self.model = self.task.build_model()
        self.calls = ModelCalls(self.evaluate, self.model)
        self.stages = all_stages(self.model, ParallelPlan.model_validate({**PLAN, **plan}), Layout(pp=pp))
        for stage in self.stages.values():
            assert stage.forward_pass is not None
            stage.forward_pass.install_hooks(stage.module)

    def evaluate(self, model: nn.Module, batch: Tensor) -> Returned:
        return read_returned(self.task.loss(model, batch), self.task.loss)

    def loss(self, batch: Tensor, seed: int = 11) -> Returned:
        """With hidden states that keep their graph, so that the gradients are those of the whole model."""
        seed_everything(seed)
        call = self.calls.catch(batch)
        received: Handover | None = None
        output: Any = None
        for index, stage in self.stages.items():
            assert stage.forward_pass is not None
            stage.forward_pass.expect(torch.empty(*call.first.shape, WIDTH, device="meta"), received)
            set_generator_states(call.at_call)
            output = stage.module(*call.args, **call.kwargs)
            if index < len(self.stages) - 1:
                received = stage.forward_pass.handed_over()
        return self.calls.loss_of(output, batch, call, generator_states())


def batch_of(first: int) -> Tensor:
    samples = Sequences(64)
    return torch.stack([samples[index] for index in range(first, first + 3)])


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("kind", ["plain", "rich", "ends", "same_block", "checkpointed", "frozen_stage", "frozen_last"])
@pytest.mark.parametrize("pp", [2, 4])
def test_loss_gradients_metrics_and_randomness_are_those_of_the_whole_model(kind: str, pp: int) -> None:
    whole = Staged({"kind": kind}, {}, 3)
    seed_everything(5)
    model = whole.build_model()
    split = Split(kind, pp, first=["embedding", *(["position"] if kind == "rich" else [])])
    for first in range(12):  # blocks are left out at random, also all of a stage
        seed_everything(first)
        expected = read_returned(whole.loss(model, batch_of(first)), whole.loss)
        afterwards = generator_states()
        found = split.loss(batch_of(first), first)
        assert torch.equal(found.loss, expected.loss)
        assert found.metrics == expected.metrics
        assert torch.equal(generator_states(), afterwards)
        torch.autograd.backward([found.loss, expected.loss])
    for (name, one), other in zip(model.named_parameters(), split.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-7), name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("twice", "calls the model more than once"),
        ("never", "did not call the model"),
        ("penalty", r"uses model.parameters\(\)"),
        ("input_gradient", "an input that requires a gradient"),
        ("no_tensor", "with a dict as the first argument 'tokens'"),
        ("skip_argument", "Block in pipeline stage 1 gets a value"),
        ("skip_between", "Block in pipeline stage 1 gets a value"),
        ("again", "calls blocks.0 after blocks.2"),
        ("own_head", "uses embedding.weight, which an earlier pipeline stage has"),
        ("odd_width", r"with a tensor of shape \(3, 7, 12\)"),
        ("two_values", "calls blocks.2 with tuple as its first argument"),
        ("reentrant", "while gradients are disabled"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused_by_name(kind: str, words: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=words) as caught:
        Split(kind, 2).loss(batch_of(0))
    assert "without pp" in str(caught.value) or kind in ("odd_width", "reentrant")


def test_a_micro_batch_of_another_shape_is_refused() -> None:
    split = Split("plain", 2)
    (stage, *_) = split.stages.values()
    assert stage.forward_pass is not None
    stage.forward_pass.expect(torch.empty(3, LENGTH, WIDTH, device="meta"), None)
    with pytest.raises(TypeError, match="All micro-batches must have one shape"):
        stage.module(torch.zeros(3, LENGTH - 1, dtype=torch.int64) % VOCABULARY)


def test_the_state_of_every_generator_can_be_set_again() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.rand(3).tolist()

    seed_everything(4)
    draw()  # leaves the second value of a pair in two of the generators
    states = generator_states()
    expected = draw()
    seed_everything(9)
    set_generator_states(states)
    assert torch.equal(generator_states(), states)
    assert draw() == expected
