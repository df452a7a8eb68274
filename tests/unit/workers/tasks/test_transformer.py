"""The model is causal, rotates by distance, is initialised from the global generator, and has its stated size."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal_workers.contract.language_model import LanguageModelConfig, feed_forward_dim
from shoal_workers.tasks.transformer import Transformer, rotate, rotation_table

VOCAB = 40


def _config(**changes: Any) -> LanguageModelConfig:
    small: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 16}
    return LanguageModelConfig.model_validate({**small, **changes})


def _model(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(_config(**changes), VOCAB)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": None}, {"num_kv_heads": 1}, {"tied_head": False}])
def test_tokens_become_logits(changes: dict[str, Any]) -> None:
    logits = _model(**changes)(torch.zeros(3, 16, dtype=torch.int64))
    assert logits.shape == (3, 16, VOCAB)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_token_is_predicted_from_those_before_it_only(num_kv_heads: int) -> None:
    model = _model(num_kv_heads=num_kv_heads)
    tokens = torch.randint(VOCAB, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-6


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    model = _model()
    tokens = torch.randint(VOCAB, (2, 16))
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]), rtol=1e-5, atol=1e-5)


def test_tokens_use_their_given_positions() -> None:
    model = _model()
    tokens = torch.randint(VOCAB, (2, 16))
    assert torch.equal(model(tokens), model(tokens, torch.arange(16)))
    one = model(tokens[:, :8], torch.arange(8, 16))
    torch.testing.assert_close(one, model(tokens[:, :8]), rtol=1e-4, atol=1e-4)  # only distances count
    assert not torch.allclose(one, model(tokens[:, :8], torch.arange(0, 16, 2)), atol=1e-3)


def test_a_stage_of_a_pipeline_is_the_model_with_pass_throughs() -> None:
    whole, tokens = _model(tied_head=False), torch.randint(VOCAB, (2, 16))
    first, last = _model(tied_head=False), _model(tied_head=False)
    first.blocks, first.norm, first.head = first.blocks[:1], nn.Identity(), nn.Identity()  # type: ignore[assignment]
    last.embedding, last.blocks = nn.Identity(), last.blocks[1:]  # type: ignore[assignment]
    positions = torch.arange(16)
    assert torch.equal(last(first(tokens, positions), positions), whole(tokens, positions))


def test_attention_works_with_a_part_of_the_heads() -> None:
    """As on a rank of tensor parallelism: half of the outputs of query, key and value, half of the inputs of out."""
    attention = _model().blocks[0].attention
    rotations, x = rotation_table(16, 8, 10_000.0), torch.randn(2, 16, 32)
    whole = attention(x, rotations)
    parts = []
    for half in range(2):
        part = copy.deepcopy(attention)
        for name, dim in (("query", 0), ("key", 0), ("value", 0), ("out", 1)):
            linear = part.get_submodule(name)
            linear.weight = nn.Parameter(linear.weight.chunk(2, dim)[half])  # type: ignore[operator, union-attr]
        parts.append(part(x, rotations))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_heads_may_be_wider_than_their_share_of_the_model() -> None:
    model = _model(head_dim=16)
    assert model.blocks[0].attention.query.weight.shape == (64, 32)
    assert model(torch.zeros(3, 16, dtype=torch.int64)).shape == (3, 16, VOCAB)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_holds_the_embedding_itself(tied: bool) -> None:
    model = _model(tied_head=tied)
    assert (model.head.weight is model.embedding.weight) == tied
    assert len(list(model.parameters())) == 2 * 9 + 1 + (1 if tied else 2)


@settings(deadline=None)
@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 20))
def test_rotated_products_depend_on_the_distance_only(i: int, j: int, shift: int) -> None:
    table = rotation_table(64, 8, 10_000.0)
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)

    def product(i: int, j: int) -> float:
        at_i, at_j = (rotate(x.view(1, 1, 1, 8), table[:, n : n + 1]) for x, n in ((q, i), (k, j)))
        return (at_i * at_j).sum().item()

    assert product(i, j) == pytest.approx(product(i + shift, j + shift), abs=1e-4)
    assert rotate(q.view(1, 1, 1, 8), table[:, :1]).flatten().tolist() == pytest.approx(q.tolist())


def test_weights_are_a_function_of_the_global_seed() -> None:
    one, same, other = _model(1).state_dict(), _model(1).state_dict(), _model(2).state_dict()
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = Transformer(_config(dim=128, num_layers=6), 257)
    tokens = torch.randint(257, (4, 17))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert 5.4 < loss.item() < 6.8  # ln 257 = 5.55, and a tied head begins by expecting the token that it has just read


def test_the_rotation_table_is_not_state_and_is_real_even_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(_config(), VOCAB)
    assert "rotations" not in model.state_dict()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.rotations, _model().rotations)
    assert model.rotations.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_the_sum_of_its_parts(tied: bool) -> None:
    dim, hidden, head = 32, feed_forward_dim(_config()), 8
    attention = dim * 4 * head + 2 * dim * 2 * head + 4 * head * dim
    expected = VOCAB * dim * (1 if tied else 2) + 2 * (attention + 3 * dim * hidden + 2 * dim) + dim
    assert sum(p.numel() for p in _model(tied_head=tied).parameters()) == expected


@pytest.mark.parametrize(("dim", "hidden"), [(32, 96), (128, 352), (384, 1024), (1, 32)])
def test_the_default_hidden_width_is_eight_thirds_rounded_up(dim: int, hidden: int) -> None:
    assert feed_forward_dim(LanguageModelConfig(dim=dim, head_dim=2)) == hidden


def test_dropout_is_seeded_by_the_global_generator_and_off_in_eval() -> None:
    model = _model(dropout=0.5)
    tokens = torch.randint(VOCAB, (2, 16))

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        logits: torch.Tensor = model(tokens)
        return logits

    assert torch.equal(run(), run())
    assert not torch.equal(run(), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_bf16_weights_give_nearly_the_same_logits() -> None:
    model = _model()
    tokens = torch.randint(VOCAB, (2, 16))
    exact = model(tokens)
    model.bfloat16()
    assert (model(tokens).float() - exact).abs().max() < 0.1
