"""Libraries for ``FP8(backend=...)``, and the recipes that they take."""

from prepkit.config import MSAMP as MSAMP
from prepkit.config import DelayedScaling as DelayedScaling
from prepkit.config import MXFP8BlockScaling as MXFP8BlockScaling
from prepkit.config import TorchAO as TorchAO
from prepkit.config import TransformerEngine as TransformerEngine
