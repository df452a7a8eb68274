"""Settings of the whole process, or of the training thread, that code of the task may leave changed.

    gradient and inference mode,    refused: Shoal's own tensors, and every later call, would be computed otherwise than
    default device, autocast        the task's author saw
    default dtype                   accepted from the import to the last `build_dataset`, so that all later calls have
                                    it, in every worker; refused later, since ranks and steps would differ
    number of threads, anomaly      undone after each call, with a remark in the log, once: the spec decides, or the
    detection, deterministic mode   setting counts in the call that makes it

Everything else is the task's own business: seeds (each micro-batch is seeded anew), the working directory (Shoal's
paths are absolute), TF32, cuDNN's benchmark. Read before and after each call into the task, which takes 2 us. Called by
`UserCode` on the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils import _device

from shoal_workers.contract.messages import Phase

_AUTOCAST_DEVICES = ("cpu", "cuda")
_entered: list[object] = []
"""Modes that are ended when they are freed."""
_UNDONE = {
    "threads": "torch.set_num_threads(), which was undone: worker.cpus decides how many threads a worker has.",
    "anomaly": "torch.autograd.set_detect_anomaly(), which was undone: called within loss(), it counts for the "
    "backward pass of that micro-batch.",
    "deterministic": "torch.use_deterministic_algorithms(), which was undone: deterministic: true in the spec asks "
    "for equal bits.",
}


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """As they are at one moment."""

    has_gradients: bool
    is_inference: bool
    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[bool, ...]
    threads: int
    anomaly: tuple[bool, bool]
    deterministic: tuple[bool, bool]

    @staticmethod
    def now() -> ProcessSettings:
        return ProcessSettings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            _device.CURRENT_DEVICE,
            tuple(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES)),
            torch.get_num_threads(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    def left_by(self, phase: Phase) -> tuple[str, list[str]]:
        """What a call that began with these settings has left: why that is refused (empty: it is not), and the remarks
        on what was undone. Afterwards all are as they were, but for what is accepted."""
        now = ProcessSettings.now()
        if now == self:
            return "", []
        refused = _refused(self, now, phase)
        remarks = [
            f"The task calls {words}" for name, words in _UNDONE.items() if getattr(now, name) != getattr(self, name)
        ]
        _restore(self, now, keeps_dtype=not refused)
        return refused, remarks


def _refused(before: ProcessSettings, after: ProcessSettings, phase: Phase) -> str:
    if after.is_inference != before.is_inference:
        return "inference mode was left on; write `with torch.inference_mode():` around what needs it."
    if after.has_gradients != before.has_gradients:
        state = "on" if after.has_gradients else "off"
        return (
            f"gradients were switched {state} and left so (torch.set_grad_enabled({after.has_gradients})); write "
            "`with torch.no_grad():` around what needs none. Shoal itself validates without gradients."
        )
    if after.device != before.device and after.device != torch.device("cpu"):
        return (
            f"the default device was left at {after.device} (torch.set_default_device); leave it: build_model() builds "
            "on the CPU and Shoal moves model and batches, and new tensors take device=batch.device."
        )
    if after.autocast != before.autocast:
        return (
            "autocast was left on (torch.set_autocast_enabled); set precision: bf16 in the spec, or write "
            "`with torch.autocast(...):` around what needs it."
        )
    if after.dtype != before.dtype and phase is not Phase.PREPARING:
        return (
            f"the default dtype was left at {after.dtype} (torch.set_default_dtype), which only calls after this one "
            "would have; set it where the module is imported, or give tensors and modules a dtype=."
        )
    return ""


def _restore(before: ProcessSettings, now: ProcessSettings, *, keeps_dtype: bool) -> None:
    if now.is_inference != before.is_inference:
        mode = torch._C._InferenceMode(before.is_inference)
        mode.__enter__()  # type: ignore[no-untyped-call]
        _entered.append(mode)
    torch.set_grad_enabled(before.has_gradients)
    if not keeps_dtype:
        torch.set_default_dtype(before.dtype)
    if now.device != before.device:
        torch.set_default_device(before.device)
    for device, is_enabled in zip(_AUTOCAST_DEVICES, before.autocast, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
    torch.set_num_threads(before.threads)
    torch.autograd.set_detect_anomaly(*before.anomaly)
    is_deterministic, warns_only = before.deterministic
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
