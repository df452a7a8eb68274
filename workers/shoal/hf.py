"""The `Trainer` of Hugging Face transformers: a job's page for scripts with it, and the Trainer as a loop in place.

    import shoal.hf                                          registers the name, for
    TrainingArguments(..., report_to="shoal")                as any other tracker
    Trainer(..., callbacks=[shoal.hf.ShoalCallback()])       the same without a name

What the Trainer logs (every `logging_steps`) becomes the step, the curves and the remaining time. Without Shoal nothing
happens.

    def train(run):                                          called again when the group changes
        shoal.hf.InPlaceTrainer(model, arguments, train_dataset=..., run=run, global_size=64).train()

In place the Trainer keeps its loop, callbacks, evaluation and logs. Shoal divides the samples, sums the gradients and
keeps the state: besides model, optimizer and scheduler also TrainerState, callbacks and the best model. So a killed
worker costs the step under way (docs/loops.md says when more). The Trainer itself takes its process for the only one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import ExportableState

import shoal
from shoal.names import is_evaluation, metric_name, sorted_out
from shoal.trainer_state import Attributes, as_numbers, count_samples

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
        self.run = run  # the Trainer asks at once which rank this is
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps is {trainer.args.gradient_accumulation_steps}. In place a step has "
                "global_size samples, and each rank takes its micro-batches of them; leave it at 1."
            )
        self._global_size = global_size
        self._micro_size = micro_size or trainer.args.per_device_train_batch_size
        self._clip = trainer.args.max_grad_norm or None
        trainer.args.max_grad_norm = 0.0  # `run.update` clips, when the gradients of all ranks are there
        self._norm: float | None = None
        self._is_open = False
        """A step is computed and not committed yet: evaluation and callbacks may still follow."""
        self.progress = _Progress(trainer)
        self._best = _Best(trainer.model) if trainer.args.load_best_model_at_end else None
        trainer.callback_handler.callbacks.insert(0, _Epochs(self))
        trainer.add_callback(_Boundary(self))

    def get_train_dataloader(self) -> _Steps:
        return _Steps(self, self.run, self._global_size, self._micro_size)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The last of the objects that make up the state is made: track them, and go on from the step that they are
        of."""
        made = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        best = {} if self._best is None else {"best_model": self._best}
        self.progress.begin()
        self.run.track(
            model=trainer.model,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            trainer=self.progress,
            **best,
        )
        trainer.state.global_step = self.run.step
        return made

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch in which the state is, with which the Trainer goes on."""
        super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        return self.run.entry_step // self.steps_per_epoch, 0

    @property
    def steps_per_epoch(self) -> int:
        trainer: Any = self
        return max(1, len(trainer.train_dataset) // self._global_size)

    def complete_step(self) -> None:
        """All that belongs to the step is done, also evaluation and callbacks."""
        if self._is_open:
            self._is_open = False
            self.run.commit()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """All micro-batches of this rank, and the update. The Trainer's own call of the optimizer, which follows, finds
        no gradient and changes nothing."""
        trainer: Any = self
        model.train()
        losses = []
        for batch in inputs["micro_batches"]:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, batch)
            self.run.backward(loss, weight=count_samples(batch))
            losses.append(loss.detach())
        self._norm = self.run.update(trainer.optimizer, clip=self._clip)
        self._is_open = True
        return sum(losses) / len(losses)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """That of the update; the gradients are gone."""
        return self._norm

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        is_new = bool(super()._determine_best_metric(metrics=metrics, trial=trial))  # type: ignore[misc]
        if is_new and self._best is not None:
            trainer: Any = self
            self._best.copy(trainer.model)
            trainer.state.best_model_checkpoint = f"step {trainer.state.global_step}, kept in memory"
        return is_new

    def _load_best_model(self) -> None:
        """The Trainer writes no checkpoints: the best model is part of the state."""
        trainer: Any = self
        assert self._best is not None
        self.complete_step()
        trainer.model.load_state_dict(self._best.state_dict())
        trainer.state.best_model_checkpoint = None

    def is_world_process_zero(self) -> bool:
        """Return whether this rank writes files."""
        return bool(self.run.is_rank_zero)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0, as with several processes."""
        if self.run.is_rank_zero:
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        self.run.log(**{metric_name(name): value for name, value in sorted_out(logs)[1].items() if is_evaluation(name)})


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
        return int(self._trainer.steps_per_epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self._trainer
        trainer.complete_step()
        trainer.progress.restore()
        for batch in self._run.global_batches(trainer.train_dataset, **self._sizes, collate=trainer.data_collator):
            if self._run.step >= trainer.state.max_steps:
                return
            yield {"micro_batches": batch}
            trainer.complete_step()


class _Progress:
    """The state of a Trainer besides model, optimizer and scheduler: TrainerState, callbacks, and the sums for its
    logs."""

    _SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
    _OF_NOW = frozenset(
        {"max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"}
        | {"stateful_callbacks", "is_local_process_zero", "is_world_process_zero"}
    )
    """What the arguments and the rank say."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._callbacks = Attributes({})
        self._pending: dict[str, Any] | None = None

    def begin(self) -> None:
        """The callbacks of the Trainer are known. Those of the library have no state, or say what it is."""
        callbacks = enumerate(self._trainer.callback_handler.callbacks)
        self._callbacks = Attributes(
            {
                f"{number} {type(callback).__name__}": callback
                for number, callback in callbacks
                if isinstance(callback, ExportableState)
                or not type(callback).__module__.startswith(("transformers.", "shoal."))
            }
        )

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        fields = {name: value for name, value in dataclasses.asdict(trainer.state).items() if name not in self._OF_NOW}
        sums = {name: getattr(trainer, name, 0.0) for name in self._SUMS}
        loss = float(getattr(trainer, "_tr_loss", 0.0))
        return {"state": as_numbers(fields), "callbacks": self._callbacks.state(), "sums": sums, "loss": loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = state

    def restore(self) -> None:
        """Put it into the Trainer, after what the Trainer does at the beginning."""
        if self._pending is None:
            return
        trainer, pending, self._pending = self._trainer, self._pending, None
        for name, value in pending["state"].items():
            setattr(trainer.state, name, value)
        trainer._tr_loss = torch.tensor(pending["loss"], device=trainer.args.device)
        for name, value in pending["sums"].items():
            setattr(trainer, name, value)
        self._callbacks.restore(pending["callbacks"])


class _Best:
    """The parameters and buffers of the best model so far, in memory of their own."""

    def __init__(self, model: Any) -> None:
        self._tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def copy(self, model: Any) -> None:
        for name, tensor in model.state_dict().items():
            self._tensors[name].copy_(tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self._tensors[name].copy_(tensor)


class _Epochs(TrainerCallback):  # type: ignore[misc]
    """Before all other callbacks: counts epochs from the beginning of the job. An epoch that was entered in its middle
    ends where it would have ended."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        per_epoch = self._trainer.steps_per_epoch
        epoch = (state.global_step - 1) // per_epoch
        state.epoch = epoch + (state.global_step - epoch * per_epoch) / per_epoch
        control.should_epoch_stop = control.should_epoch_stop or state.global_step % per_epoch == 0
        return control


class _Boundary(TrainerCallback):  # type: ignore[misc]
    """Ends the last step for Shoal. Shoal keeps the checkpoints, so the Trainer writes none."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = False
        return control

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.complete_step()


integration_utils.INTEGRATION_TO_CALLBACK["shoal"] = ShoalCallback
