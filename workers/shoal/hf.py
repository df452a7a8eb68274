"""The `Trainer` of Hugging Face transformers: a job's page for scripts with it, and the Trainer as a loop in place.

    import shoal.hf                                          registers the name, for
    TrainingArguments(..., report_to="shoal")                as any other tracker
    Trainer(..., callbacks=[shoal.hf.ShoalCallback()])       the same without a name

What the Trainer logs (every `logging_steps`) becomes the step, the curves and the remaining time. Without Shoal nothing
happens.

    def train(run):                                          called again when the group changes
        shoal.hf.InPlaceTrainer(model, arguments, train_dataset=..., run=run, global_size=64).train()

In place the Trainer keeps its loop, callbacks, evaluation and logs. Shoal divides the samples, sums the gradients and
keeps the state, so a killed worker costs one step at most. The Trainer itself takes its process for the only one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

import shoal
from shoal.names import is_evaluation, metric_name, sorted_out

if TYPE_CHECKING:
    from shoal_workers.engine.loop.run import Run

__all__ = ["InPlace", "InPlaceTrainer", "ShoalCallback"]


class ShoalCallback(TrainerCallback):  # type: ignore[misc]
    """Passes on what the Trainer logs to `shoal.log`."""

    def __init__(self) -> None:
        self._logged = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "train_runtime" in logs:  # the summary at the end
            return
        known, others = sorted_out(logs)
        self._logged = state.global_step
        shoal.log(state.global_step, total_steps=state.max_steps, **known, **others)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._logged < state.global_step:  # the last step need not be one that is logged
            shoal.log(state.global_step, total_steps=state.max_steps)


class InPlace:
    """Makes a Trainer one for `shoal.run`: `class Mine(InPlace, MyTrainer)`. It takes the arguments of that Trainer and

    Args:
        run: of the loop.
        global_size: samples of a step, over all ranks; takes the place of the batch size per device, of accumulation
            and of the number of processes.
        micro_size: samples of a micro-batch. Default: `per_device_train_batch_size`.

    Raises:
        ValueError: the arguments of the Trainer ask for what Shoal does itself.
    """

    def __init__(self, *args: Any, run: Run, global_size: int, micro_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps is {trainer.args.gradient_accumulation_steps}. In place a step has "
                "global_size samples, and each rank takes its micro-batches of them; leave it at 1."
            )
        self.run = run
        self._global_size = global_size
        self._micro_size = micro_size or trainer.args.per_device_train_batch_size
        self._clip = trainer.args.max_grad_norm or None
        trainer.args.max_grad_norm = 0.0  # `run.update` clips, when the gradients of all ranks are there
        trainer.add_callback(_Boundary(run))

    def get_train_dataloader(self) -> _Steps:
        return _Steps(self, self.run, self._global_size, self._micro_size)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The last of the objects that make up the state is made: track them, and go on from the step that they are
        of."""
        made = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        self.run.track(model=trainer.model, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler)
        trainer.state.global_step = self.run.step
        return made

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """All micro-batches of this rank, and the update. The Trainer's own call of the optimizer, which follows, finds
        no gradient and changes nothing."""
        trainer: Any = self
        model.train()
        losses = []
        for batch in inputs["micro_batches"]:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, batch)
            self.run.backward(loss, weight=_num_samples(batch))
            losses.append(loss.detach())
        self.run.update(trainer.optimizer, clip=self._clip)
        return sum(losses) / len(losses)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        self.run.log(**{metric_name(name): one for name, one in sorted_out(logs)[1].items() if is_evaluation(name)})


class InPlaceTrainer(InPlace, Trainer):  # type: ignore[misc]
    """The Trainer of transformers, for `shoal.run`."""


class _Steps:
    """What the Trainer takes for its loader: one item for each step, with this rank's micro-batches in it."""

    def __init__(self, trainer: Any, run: Run, global_size: int, micro_size: int) -> None:
        self._trainer = trainer
        self._run = run
        self._sizes = {"global_size": global_size, "micro_size": micro_size}

    def __len__(self) -> int:
        """Steps of an epoch, by which the Trainer counts."""
        return max(1, len(self._trainer.train_dataset) // self._sizes["global_size"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self._trainer
        for batch in self._run.global_batches(trainer.train_dataset, **self._sizes, collate=trainer.data_collator):
            if self._run.step >= trainer.state.max_steps:
                return
            yield {"micro_batches": batch}


class _Boundary(TrainerCallback):  # type: ignore[misc]
    """Ends each step for Shoal. Shoal keeps the checkpoints, so the Trainer writes none."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._run.commit()
        return self._without_save(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        return self._without_save(control)

    @staticmethod
    def _without_save(control: Any) -> Any:
        control.should_save = False
        return control


def _num_samples(batch: Any) -> int:
    values = batch.values() if hasattr(batch, "values") else batch
    return next((len(one) for one in values if getattr(one, "ndim", 0)), 1)


integration_utils.INTEGRATION_TO_CALLBACK["shoal"] = ShoalCallback
