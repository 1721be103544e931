"""Selections of modules that become units, or are checkpointed or compiled.

The classes keep the names that config files and messages have: ``pk.wrap.WrapClasses``, ``kind = "WrapClasses"``.
"""

from prepkit.config import WrapBlocks as WrapBlocks
from prepkit.config import WrapClasses as WrapClasses
from prepkit.config import WrapPaths as WrapPaths
from prepkit.config import WrapRoot as WrapRoot
from prepkit.config import WrapSize as WrapSize
