"""The package that a program of the user's own may import: a script reports its progress with one line, and a loop
gives its function to Shoal.

    import shoal
    shoal.log(step=step, loss=loss, lr=scheduler.get_last_lr()[0], accuracy=accuracy)      in a script
    shoal.run(train)                                                                      for a loop in place

Under `shoal submit train.py` what is logged becomes the curves, the step and the remaining time on the job's page. Run
by any other means (torchrun, python) `log` does nothing. It never raises, and never waits for the service: what cannot
be sent is dropped. Imports the standard library only, until `run` is called.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal_workers.engine.loop.run import Run

__all__ = ["checkpoint_dir", "log", "run"]

_HOOK = "SHOAL_HOOK"
_CHECKPOINT_DIR = "SHOAL_CHECKPOINT_DIR"
_MEDIA = ("images", "histogram", "table", "text")
_MEDIA_TARGET = "SHOAL_MEDIA"
_SEND_S = 0.5
"""The longest time for which a call waits for the worker to read. Then its values are dropped."""


def log(
    step: int | None = None,
    loss: Any = None,
    *,
    lr: Any = None,
    grad_norm: Any = None,
    tokens: Any = None,
    total_steps: int | None = None,
    **metrics: Any,
) -> None:
    """Report a completed optimizer step. Every rank may call it; what rank 0 reports is shown.

    Values are numbers, or what `float()` accepts: tensors with one element, numpy scalars. A tensor on a GPU is waited
    for.

    Args:
        step: optimizer steps completed since the beginning of training, also if it went on from a checkpoint; None
            means one more than in the call before.
        loss: mean over the global batch.
        tokens: tokens or samples of the step's global batch, of all ranks together.
        total_steps: the step with which training ends; the remaining time is computed from it.
        metrics: other values by name, 16 names at most. `images`, `histogram`, `table` and `text` are media if they are
            mappings from names to values; see docs/media.md. In a script they belong to `step`, or, in a call without
            step and numbers, to the step of the call before; in a task to the step that is under way.
    """
    media = {kind: metrics.pop(kind) for kind in _MEDIA if isinstance(metrics.get(kind), Mapping)}
    has_numbers = bool(metrics) or any(value is not None for value in (loss, lr, grad_norm, tokens, total_steps))
    if media:
        _log_media(media, step if step is not None else _connection.step + has_numbers)
    if not os.environ.get(_HOOK) or (media and not has_numbers):
        return
    try:
        _connection.send(_message(step, loss, lr, grad_norm, tokens, total_steps, metrics))
    except Exception as error:  # never the script's problem
        _connection.complain("values are not reported", error)


def checkpoint_dir() -> str | None:
    """Return the directory in which the script shall keep its checkpoints, durable and the same for all attempts of the
    job; None if the script does not run under Shoal."""
    return os.environ.get(_CHECKPOINT_DIR) or None


def run(train: Callable[[Run], None]) -> None:
    """Call `train(run)` whenever the group of workers changes, until it returns; see docs/loops.md.

    Under the service the worker calls it, and this call does not return. Elsewhere, also under torchrun, it trains in
    this process, and returns when the loop has.
    """
    from shoal_workers.engine.loop.entry import Captured, is_capturing

    if is_capturing():
        raise Captured(train)
    from shoal_workers.standalone import run_loop

    run_loop(train)


def _log_media(media: dict[str, Any], step: int) -> None:
    current = sys.modules.get("shoal_workers.engine.media.current")  # loaded where the engine trains in this process
    try:
        if (current is None or not current.log_current(media)) and os.environ.get(_MEDIA_TARGET):
            from shoal_workers.script.media import log_media

            log_media(int(step), media)
    except Exception as error:  # never the script's problem
        _connection.complain("images, histograms, tables or texts are not kept", error)


def _message(
    step: int | None, loss: Any, lr: Any, grad_norm: Any, tokens: Any, total_steps: Any, metrics: dict[str, Any]
) -> dict[str, Any]:
    refused: list[str] = []
    named = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens, "total_steps": total_steps}
    values = {name: _number(name, value, refused) for name, value in named.items()}
    numbers = {name: _number(name, value, refused) for name, value in metrics.items()}
    _connection.step = _connection.step + 1 if step is None else int(step)
    return {"step": _connection.step, "at": time.time(), **values, "metrics": numbers, "refused": refused}


def _number(name: str, value: Any, refused: list[str]) -> float | None:
    if value is None:
        return None
    try:
        detach = getattr(value, "detach", None)  # torch warns if a tensor with a gradient becomes a number
        return float(value if detach is None else detach())
    except (TypeError, ValueError, RuntimeError):
        refused.append(name)
        return None


class _Connection:
    """The connection of this process to its worker; a forked process makes its own."""

    def __init__(self) -> None:
        self.step = 0
        self._pid = 0
        self._socket: socket.socket | None = None
        self._complaints: set[str] = set()

    def send(self, message: dict[str, Any]) -> None:
        if self._socket is None or self._pid != os.getpid():
            self._socket, self._pid = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), os.getpid()
            self._socket.settimeout(_SEND_S)
            self._socket.connect(os.environ[_HOOK].replace("@", "\0", 1))
        self._socket.send(json.dumps(message).encode())

    def complain(self, what: str, error: Exception) -> None:
        """Say it once."""
        if what not in self._complaints:
            self._complaints.add(what)
            sys.stderr.write(f"shoal.log: {what}: {type(error).__name__}: {error}\n")


_connection = _Connection()
