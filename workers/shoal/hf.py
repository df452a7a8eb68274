"""A job's page for programs with the `Trainer` of Hugging Face transformers.

    import shoal.hf                                          registers the name, for
    TrainingArguments(..., report_to="shoal")                as any other tracker
    Trainer(..., callbacks=[shoal.hf.ShoalCallback()])       the same without a name

What the Trainer logs (every `logging_steps`) becomes the step, the curves and the remaining time. Without Shoal nothing
happens.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

import shoal
from shoal.names import sorted_out

__all__ = ["ShoalCallback"]


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


integration_utils.INTEGRATION_TO_CALLBACK["shoal"] = ShoalCallback
