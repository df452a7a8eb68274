"""The planner: the legal layouts for a number of workers, the predicted cost of each, and the best one.

The supervisor calls `plan` whenever a group forms; `control/` calls `rank` and `refusal` for `shoal plan` and submits.
It runs nothing, needs no GPU and never imports torch or Ray: it is arithmetic with numpy over the spec and a profile.

    shape          parameters, arithmetic and activations of a model
    gpus           built-in hardware profiles (`core/hardware_profile.py` defines them)
    cuts           which blocks each pipeline stage gets
    candidates     all legal layouts, one array per column
    memory         bytes of one rank, with `host_memory`
    step_time      seconds of one step, with `collectives` and `links`
    preferences    the rules of thumb by name, and the reasons that people read
    ranking        candidates, memory and step time together, in order
    planning       `plan`: one layout for a job and a number of workers
    capacity       what would fit if no layout does
    report         `rank`: the table of `shoal plan`
"""

from __future__ import annotations

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.planner.planning import plan, plan_ahead, plans
from shoal_service.planner.prediction import Prediction, Ranking
from shoal_service.planner.report import memory_note, rank, refusal

__all__ = ["HardwareProfile", "Prediction", "Ranking", "memory_note", "plan", "plan_ahead", "plans", "rank", "refusal"]
