"""Lightning's `Trainer`: a job's page for scripts with it, and the Trainer as a loop in place.

    Trainer(..., logger=ShoalLogger(total_steps=1000))

What `self.log` is given becomes the step, the curves and the remaining time, every `log_every_n_steps`. Without Shoal
nothing happens.

    def train(run):                                                         called again when the group changes
        Trainer(..., strategy=InPlaceStrategy(run, global_size=64)).fit(module, loader)

In place the Trainer keeps its loop, callbacks and validation, and a killed worker costs the step under way
(docs/loops.md says when more). The state of its loops, of its callbacks and of the attributes of the module is tracked
with model, optimizer and schedulers. Both names of the library are served: `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import shoal
from shoal.names import sorted_out
from shoal.trainer_state import Attributes, as_numbers, count_samples

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.strategies import SingleDeviceStrategy
else:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers.logger import Logger
    from pytorch_lightning.strategies import SingleDeviceStrategy

if TYPE_CHECKING:
    from shoal_workers.engine.loop.run import Run

__all__ = ["InPlaceStrategy", "ShoalLogger"]


class ShoalLogger(Logger):  # type: ignore[misc]
    """Passes on what the Trainer logs to `shoal.log`.

    Args:
        total_steps: the step with which training ends, for the remaining time; a logger of Lightning does not know it.
    """

    def __init__(self, *, total_steps: int | None = None) -> None:
        super().__init__()
        self._total_steps = total_steps

    @property
    def name(self) -> str:
        return "shoal"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Lightning counts steps from 0: what it logs with step 49 is of the 50th, which is then complete."""
        known, others = sorted_out(metrics)
        completed = None if step is None else step + 1
        shoal.log(completed, total_steps=self._total_steps, **known, **others)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the job's spec has the arguments of the program."""


class InPlaceStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Lets a Trainer of Lightning train in a loop for `shoal.run`: Shoal divides the samples, sums the gradients and
    keeps the state. The Trainer itself takes its process for the only one.

    Args:
        run: of the loop.
        global_size: samples of a step, over all ranks. The training DataLoader gives its dataset, `collate_fn`, and its
            `batch_size` as that of a micro-batch.
    """

    strategy_name = "shoal_in_place"

    def __init__(self, run: Run, *, global_size: int) -> None:
        super().__init__(device=run.device)
        self._run = run
        self._global_size = global_size
        self._trainer: Any = None
        self._progress: Any = None
        self._is_open = False
        """A step is computed and not committed yet: schedulers may still follow."""

    @property
    def is_global_zero(self) -> bool:
        """True if this rank writes files."""
        return self._run.is_rank_zero

    def setup(self, trainer: Any) -> None:
        """All that makes up the state is made: tracks it, and goes on from the step that it is of.

        Raises:
            ValueError: the module trains in a way that cannot be divided among ranks.
        """
        super().setup(trainer)
        self._trainer = trainer
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        _refuse(trainer, self.lightning_module, self.optimizers, self.lr_scheduler_configs)
        named = {f"lr_scheduler_{number}": scheduler for number, scheduler in enumerate(schedulers)}
        self._progress = _Progress(trainer, self.lightning_module)
        self._run.track(model=self.lightning_module, optimizer=self.optimizers[0], trainer=self._progress, **named)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._progress.restore_attributes()

    def process_dataloader(self, dataloader: Any) -> Any:
        return _Steps(self, dataloader) if self.lightning_module.trainer.training else dataloader

    def training_step(self, batch: Any, *rest: Any, **others: Any) -> Any:
        """All micro-batches of this rank, and the update. What Lightning does with the optimizer after it finds no
        gradient and changes nothing."""
        losses = []
        for micro in batch.micro_batches:
            output = super().training_step(micro, *rest, **others)
            loss = output["loss"] if isinstance(output, dict) else output
            self._run.backward(loss, weight=count_samples(micro))
            losses.append(loss.detach())
        self._run.update(self.optimizers[0], clip=self._trainer.gradient_clip_val)
        self._is_open = True
        return sum(losses) / len(losses)

    def backward(self, closure_loss: Any, *_: Any, **__: Any) -> Any:
        """The gradients were made in `training_step`."""
        return closure_loss

    def on_train_end(self) -> None:
        self.commit()
        super().on_train_end()

    def commit(self) -> None:
        """The step is complete, also for schedulers and callbacks."""
        if self._is_open:
            self._is_open = False
            _refuse_means(self._trainer)
            self._run.commit()

    def steps(self, dataloader: Any) -> Iterator[Any]:
        """This rank's micro-batches of each step."""
        for batch in self._run.global_batches(
            dataloader.dataset,
            global_size=self._global_size,
            micro_size=dataloader.batch_size,
            collate=dataloader.collate_fn,
        ):
            yield _Step(batch)
            self.commit()

    def num_steps(self, dataloader: Any) -> int:
        return max(1, len(dataloader.dataset) // self._global_size)


class _Progress:
    """The state of a Trainer besides model, optimizer and schedulers: its loops, callbacks and the module's
    attributes."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._callbacks = {
            f"{number} {callback.state_key}": callback for number, callback in enumerate(trainer.callbacks)
        }
        own = {name: callback for name, callback in self._callbacks.items() if _has_state_in_attributes(callback)}
        self._attributes = Attributes({**own, "module": module})
        self._pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loops": as_numbers(trainer.fit_loop.state_dict()),
            "callbacks": {name: as_numbers(callback.state_dict()) for name, callback in self._callbacks.items()},
            "attributes": self._attributes.state(),
            "should_stop": trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, self._pending = self._trainer, state["attributes"]
        trainer.fit_loop.load_state_dict(state["loops"])
        trainer.should_stop = state["should_stop"]
        for name, callback in self._callbacks.items():
            if state["callbacks"][name]:
                callback.load_state_dict(state["callbacks"][name])
        # Lightning believes that it goes on from a checkpoint which was saved in the middle of a validation. Here the
        # validations of the steps so far are done.
        loop = trainer.fit_loop.epoch_loop
        entered, is_due = loop.batch_progress.total.ready, loop._should_check_val_fx
        loop._should_check_val_fx = lambda fetcher: loop.batch_progress.total.ready > entered and is_due(fetcher)

    def restore_attributes(self) -> None:
        """After the hooks of the beginning, which set counters to 0."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._attributes.restore(pending)


def _has_state_in_attributes(callback: Any) -> bool:
    """Callbacks of the library have state_dict() if they have a state. Of the user's, few have it."""
    kind = type(callback)
    is_of_library = kind.__module__.startswith(("lightning.", "pytorch_lightning."))
    return not is_of_library and kind.state_dict is Callback.state_dict


class _Step:
    """What Lightning takes for a batch. It cannot be iterated, so that Lightning does not look into it."""

    def __init__(self, micro_batches: Any) -> None:
        self.micro_batches = micro_batches


class _Steps:
    """What Lightning takes for the loader of training."""

    def __init__(self, strategy: InPlaceStrategy, dataloader: Any) -> None:
        self._strategy = strategy
        self._dataloader = dataloader

    def __len__(self) -> int:
        return self._strategy.num_steps(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._strategy.commit()
        return self._strategy.steps(self._dataloader)


def _refuse(trainer: Any, module: Any, optimizers: Any, schedulers: Any) -> None:
    way_out = "Train it as a script, or write the loop itself; see docs/loops.md."
    if not module.automatic_optimization or len(optimizers) != 1:
        raise ValueError(f"{type(module).__name__} optimizes by hand, or has several optimizers. {way_out}")
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}. In place a step has global_size samples, "
            "and each rank takes its micro-batches of them; leave it at 1."
        )
    if any(config.reduce_on_plateau for config in schedulers):
        raise ValueError(
            "a scheduler waits for a plateau (reduce_on_plateau). Each rank has other metrics, and Lightning does not "
            f"step it in the epoch in which a group goes on. {way_out}"
        )


def _refuse_means(trainer: Any) -> None:
    """Refuse a callback that decides by a mean over the training steps of an epoch, which Lightning does not save."""
    results = trainer.fit_loop.epoch_loop._results
    means = {result.meta.name for result in results.values() if result.meta.on_epoch}
    for callback in trainer.callbacks:
        if (name := getattr(callback, "monitor", None)) in means:
            raise ValueError(
                f"{type(callback).__name__} monitors {name}, the mean of an epoch's training steps, and the steps "
                "before a change of the group would be missing in it. Log it in validation_step, or monitor another "
                "metric."
            )
