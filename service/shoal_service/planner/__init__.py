"""The planner: the legal layouts for a number of workers, the predicted cost of each, and the best one.

The supervisor calls `plan` whenever a group forms; `control/` calls `rank` and `refusal` for `shoal plan` and submits.
It runs nothing, needs no GPU and never imports torch or Ray: it is arithmetic with numpy over the spec and a profile.

    shape          parameters, arithmetic and activations of a model
    stack          what a training program keeps, fuses and hides
    gpus           built-in hardware profiles (`core/hardware_profile.py` defines them)
    candidates     all legal layouts, one array per column, and where their pipelines are cut
    memory         bytes of one rank and of its host
    network        which links the groups of each axis cross, and seconds of a collective there
    step_time      seconds of one step
    ranking        candidates, memory and step time together, in order, by rules that have names
    planning       `plan`: one layout for a job and a number of workers
    correction     step times by what jobs on the same hardware have measured, and an error bar
    report         `rank`: the table of `shoal plan`; `refusal`: what would fit if no layout does
"""

from __future__ import annotations

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.planner.planning import plan, plan_ahead, plans
from shoal_service.planner.ranking import Prediction, Ranking
from shoal_service.planner.report import memory_note, rank, refusal

__all__ = ["HardwareProfile", "Prediction", "Ranking", "memory_note", "plan", "plan_ahead", "plans", "rank", "refusal"]
