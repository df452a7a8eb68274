"""A small corpus, and one thread: small models only lose by more."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_workers.tasks.lm import LanguageModel

SMALL: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 16}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_task(tmp_path: Path) -> Callable[..., LanguageModel]:
    """A task on a corpus of 20 documents; keywords change the model's settings."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number}: the quick brown fox. " * 20)
    data = {"paths": [str(tmp_path / "text")], "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.2}

    def make(**model: Any) -> LanguageModel:
        return LanguageModel(model={**SMALL, **model}, data=data, seed=0)

    return make


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone, without a socket."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
