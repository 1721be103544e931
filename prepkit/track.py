"""Places that ``ready.log`` writes to: ``ready.log.to(pk.track.JsonLines("run.jsonl"))``."""

from prepkit.training.trackers import JsonLines as JsonLines
from prepkit.training.trackers import MLflow as MLflow
from prepkit.training.trackers import TensorBoard as TensorBoard
from prepkit.training.trackers import WandB as WandB
