"""Tells a broken collective from any other error. torch raises a plain RuntimeError for gloo, so the text decides.

Called by `process/exits.py` and `task/user_code.py`.
"""

from __future__ import annotations

import re

from torch.distributed import DistError

from shoal_workers.contract.plain_text import text_of

_GLOO = re.compile(
    r"gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|"
    r"Timed out waiting \d+ms for (send|recv)|Application timeout caused pair closure|"
    r"NCCL (error|communicator)|ncclComm|Process group .*(aborted|shut ?down)",
    re.IGNORECASE,
)


def is_collective_error(error: BaseException) -> bool:
    """Whether `error`, or an error that it was raised from, comes from a broken collective."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, DistError) or (isinstance(link, RuntimeError) and _GLOO.search(text_of(link))):
            return True
        link = link.__cause__ or link.__context__
    return False
