"""The stack of one worker: from itself; if it does not answer, from its node with py-spy. Called by RayFleet.

worker answers within ANSWER_S (*)       its own frames, with the module of the model that it is in
it does not (stopped, GIL held)          py-spy, run by the supervisor if that is on the same node,
native frames are wanted                 else by another worker of the node

(*) and longer in a large group, all of whose workers are asked at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ray.actor import ActorHandle
from ray.exceptions import RayError

from shoal_service.core.attempt.large_groups import later_s
from shoal_workers import stacks
from shoal_workers.contract.messages import Frame, StackSource, WorkerInfo, WorkerStack

ANSWER_S = 1.0
_OUTSIDE_S = 8.0


async def take_stack(
    index: int,
    handles: Mapping[int, ActorHandle],
    infos: Mapping[int, WorkerInfo],
    node_id: str,
    *,
    life: int,
    native: bool = False,
) -> WorkerStack:
    """`node_id`: of the supervisor. Raises nothing: a worker without a stack has an `error`."""
    handle, info = handles.get(index), infos.get(index)
    name = info.worker_id if info is not None else str(index)
    answer_s = ANSWER_S + later_s(len(handles))
    if handle is None:
        return WorkerStack(worker_id=name, source=StackSource.NONE, error="the worker has ended")
    if not native or info is None:
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(handle.stack.remote(life).future()), answer_s)
            if isinstance(answer, WorkerStack):
                return answer
        except (RayError, TimeoutError):
            pass  # it is stopped, hangs with the GIL held, or has ended
    if info is None:
        words = f"the worker starts, and did not answer within {answer_s:.3g} s"
        return WorkerStack(worker_id=name, source=StackSource.NONE, error=words)
    found = await _from_outside(info, handles, infos, node_id, native=native)
    if found is None:
        found = f"it did not answer within {answer_s:.3g} s, and no other worker of its node can look at it"
    if isinstance(found, str):
        return WorkerStack(worker_id=name, pid=info.pid, source=StackSource.NONE, error=found)
    return WorkerStack(worker_id=name, pid=info.pid, frames=found, source=StackSource.PY_SPY)


async def _from_outside(
    info: WorkerInfo, handles: Mapping[int, ActorHandle], infos: Mapping[int, WorkerInfo], node_id: str, *, native: bool
) -> tuple[Frame, ...] | str | None:
    """The frames, or why there are none; None: no process of the node can look at the worker."""
    if info.node_id == node_id:
        return await asyncio.to_thread(stacks.of_worker, info.pid, native=native)
    for helper, other in list(infos.items()):
        if other.node_id == info.node_id and other.pid != info.pid and helper in handles:
            try:
                call = handles[helper].stack_of.remote(info.pid, native)
                answer: tuple[Frame, ...] | str = await asyncio.wait_for(asyncio.wrap_future(call.future()), _OUTSIDE_S)
                return answer
            except (RayError, TimeoutError):
                continue  # the helper has ended, or is stopped
    return None
