"""The built-in task meets the task contract: prepared data, seeded model, falling loss, clear errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from shoal_workers.data.errors import DataError
from shoal_workers.tasks.lm import LanguageModel

SmallTask = Callable[..., LanguageModel]


def _samples(task: LanguageModel, size: int = 4) -> list[torch.Tensor]:
    data = task.build_dataset("train")
    return [data[index] for index in range(size)]


def _batch(task: LanguageModel, size: int = 4) -> dict[str, torch.Tensor]:
    return task.collate(_samples(task, size))


def test_prepare_reports_progress_and_may_be_called_again(small_task: SmallTask) -> None:
    task, notes = small_task(), list[str]()
    task.prepare(notes.append)
    assert notes[0].startswith("tokenising")
    assert notes[-1] == "text ready"
    again = list[str]()
    task.prepare(again.append)
    assert again == ["text ready"]


def test_samples_of_both_splits_have_one_token_more_than_the_sequence(small_task: SmallTask) -> None:
    task = small_task()
    for split in ("train", "validation"):
        data = task.build_dataset(split)
        assert len(data) > 0
        assert data[0].shape == (17,)
    assert (task.tokens_per_sample, task.bytes_per_token) == (16, 1.0)


def test_the_loss_is_the_mean_over_all_targets_in_fp32(small_task: SmallTask) -> None:
    task = small_task()
    torch.manual_seed(0)
    model = task.build_model()
    samples = _samples(task)
    batch = task.collate(samples)
    each = [task.loss(model, task.collate([sample])).item() for sample in samples]
    loss = task.loss(model, batch)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(sum(each) / 4, rel=1e-5)
    logits = model(batch["tokens"])
    assert loss.item() == pytest.approx(cross_entropy(logits.transpose(1, 2), batch["labels"]).item(), rel=1e-5)
    assert task.loss(model.bfloat16(), batch).dtype == torch.float32


def test_a_batch_has_tokens_labels_and_positions(small_task: SmallTask) -> None:
    task = small_task()
    samples = _samples(task)
    batch = task.collate(samples)
    assert batch.keys() == {"tokens", "labels", "positions"}
    assert batch["positions"].tolist() == list(range(16))
    for number, sample in enumerate(samples):
        assert torch.equal(batch["tokens"][number], sample[:-1])
        assert torch.equal(batch["labels"][number], sample[1:])


def test_the_loss_falls_in_a_few_steps(small_task: SmallTask) -> None:
    task = small_task()
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = task.loss(model, _batch(task, 8))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.8 * math.log(257)
    assert losses[-1] < 0.4 * losses[0]


def test_the_vocabulary_can_be_padded_but_not_reduced(small_task: SmallTask) -> None:
    model = small_task(vocab_size=320).build_model()
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 320)
    with pytest.raises(
        ValueError, match=r"model\.vocab_size 256 is smaller than the 257 tokens of data\.tokenizer 'byt"
    ):
        small_task(vocab_size=256).build_model()


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"dimm": 3}, {"corpus": "python-stdlib"}, "dimm"),
        ({"dim": 10, "num_heads": 4}, {"corpus": "python-stdlib"}, "10 = 2 x 4 \\+ 2"),
        ({}, {}, "data must contain exactly one of corpus, paths and sources"),
    ],
)
def test_the_task_validates_its_settings_again(model: dict[str, Any], data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LanguageModel(model=model, data=data, seed=0)


def test_missing_text_is_a_clear_error(small_task: SmallTask) -> None:
    task = LanguageModel(model={}, data={"paths": ["no/such/file.txt"]}, seed=0)
    with pytest.raises(DataError, match=r"data\.paths 'no/such/file\.txt' .*matches no file"):
        task.prepare(lambda _: None)


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
def test_sharding_block_by_block_changes_nothing(
    small_task: SmallTask, one_process_group: None, tied_head: bool, bf16: bool
) -> None:
    task = small_task(tied_head=tied_head)
    batch = _batch(task)
    torch.manual_seed(0)
    whole = task.build_model()
    torch.manual_seed(0)
    sharded = task.build_model()
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    for unit in [*task.shard_units(sharded), sharded]:
        fully_shard(unit, mesh=mesh, **({"mp_policy": policy} if policy else {}))  # type: ignore[call-overload]
    losses = [task.loss(model, batch) for model in (whole, sharded)]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    tolerance = 2e-2 if bf16 else 1e-6
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=tolerance)
    names = [name for name, _ in whole.named_parameters()]
    assert names == [name for name, _ in sharded.named_parameters()]
    for expected, found in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert expected.grad is not None
        grad = found.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, expected.grad, rtol=0.2 if bf16 else 1e-4, atol=2e-2 if bf16 else 1e-6)
