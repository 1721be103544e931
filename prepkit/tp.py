"""Layers that are cut over ranks: ``Config(tp_plan=...)``."""

from prepkit.config import TPLayer as TPLayer
from prepkit.config import TPPlan as TPPlan
from prepkit.config import TPPlanFromModel as TPPlanFromModel
