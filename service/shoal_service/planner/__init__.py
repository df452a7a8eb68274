"""The planner: legal layouts of a world, what each would cost, and which is best. Pure; never imports torch.

shape          parameters, arithmetic and activations of a model
profile, gpus  what the hardware can do
cuts           where a pipeline is cut
candidates     all legal layouts, as columns
memory         bytes of one rank
step_time      seconds of one step, with `collectives`
preferences    rules of thumb by name, and the reasons that people read
ranking        the three together, ordered
planning       `plan`: one answer for a job and a number of workers
capacity       what would fit where nothing does
report         `rank`: the table of `shoal plan`
"""

from __future__ import annotations

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.planner.planning import plan, plan_ahead, plans
from shoal_service.planner.prediction import Prediction, Ranking
from shoal_service.planner.report import rank, refusal

__all__ = ["HardwareProfile", "Prediction", "Ranking", "plan", "plan_ahead", "plans", "rank", "refusal"]
