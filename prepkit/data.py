"""Treatment of the data loaders: ``Config(loaders=...)``."""

from prepkit.config import EachLoader as EachLoader
from prepkit.config import KeepLoaders as KeepLoaders
from prepkit.config import ShardLoaders as ShardLoaders
