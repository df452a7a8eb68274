"""Where a process crashed, in words, from the stacks that Python's faulthandler wrote. Pure.

    Thread 0x00007f2b (most recent call first):
      File "/home/me/digits.py", line 41 in loss
      File ".../shoal_workers/engine/task/task.py", line 84 in evaluate

The training thread counts, whichever thread got the signal. Called by `exit_status` and by `shoal check`.
"""

from __future__ import annotations

import re
import sys

_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)$', re.MULTILINE)
_TRAINING = "shoal_workers/engine/engine.py"
_PHASES = (
    ("engine/step/validation.py", "in validation"),
    ("engine/state/saving.py", "while saving"),
    ("engine/state/restore.py", "while restoring"),
    ("engine/step/", "in a training step"),
    ("engine/model/build.py", "while building the model"),
    ("engine/engine.py", "while preparing"),
)
"""The first that is on the stack."""
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3[.\d]*)/|^<")


def place_of_crash(stacks: str) -> str:
    """` in validation, at digits.py:41 in loss()`; empty if nothing is known. The line is the task's own."""
    threads = [_FRAME.findall(text) for text in re.split(r"^(?:Current t|T)hread ", stacks, flags=re.MULTILINE)[1:]]
    training = next((frames for frames in threads if any(_TRAINING in file for file, _, _ in frames)), None)
    if training is None:
        return ""
    phase = next((words for part, words in _PHASES if any(part in file for file, _, _ in training)), "")
    own = [frame for frame in training if "shoal_workers/" not in frame[0] and not _LIBRARY.search(frame[0])]
    line = f", at {_relative(own[0][0])}:{own[0][1]} in {own[0][2]}()" if own else ""
    return f" {phase}{line}" if phase else line


def _relative(file: str) -> str:
    """To the longest entry of sys.path that contains it; else its name."""
    roots = [root.rstrip("/") + "/" for root in sys.path if len(root) > 1]
    known = max((root for root in roots if file.startswith(root)), key=len, default=None)
    return file.rpartition("/")[2] if known is None else file.removeprefix(known)
