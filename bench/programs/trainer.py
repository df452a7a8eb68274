"""The same work with the `Trainer` of Hugging Face transformers. Run by `main.py`.

trainer.py          a script, for torchrun and for Shoal: it saves every few steps and goes on from what it saved
trainer.py loop     in place, under `shoal.run`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from work import GLOBAL_BATCH, MICRO_BATCH, SAVE_EVERY, Samples, model, stamp

import shoal
import shoal.hf

_ENDLESS = 1_000_000


class Classifier(nn.Module):
    """The work's model, with the loss as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels)}


class _Stamps(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            stamp(state.global_step)


def _collated(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return {"x": x, "labels": y}


def _arguments(folder: str, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=_ENDLESS,
        per_device_train_batch_size=MICRO_BATCH,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=_ENDLESS,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )


def script() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["SHOAL_CHECKPOINT_DIR"])
    whole = [one.parent for one in folder.glob("checkpoint-*/trainer_state.json")]  # the file that is written last
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    arguments = _arguments(str(folder), save_steps=SAVE_EVERY, save_total_limit=2)
    trainer = Trainer(Classifier(), arguments, train_dataset=Samples(), data_collator=_collated, callbacks=[_Stamps()])
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def loop(run: Any) -> None:
    shoal.hf.InPlaceTrainer(
        Classifier(),
        _arguments("out"),
        train_dataset=Samples(),
        data_collator=_collated,
        callbacks=[_Stamps()] if run.is_rank_zero else [],
        run=run,
        global_size=GLOBAL_BATCH,
    ).train()


if __name__ == "__main__":
    if sys.argv[1:] == ["loop"]:
        shoal.run(loop)
    else:
        script()
