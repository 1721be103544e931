"""A model that ``fully_shard`` has cut before prepkit sees it stays the object it is, and trains as it would by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import prepkit as pk
from prepkit.findings import Refused
from prepkit.steps import RebindOptimizer, ReleaseOptimizer, ShardUnits
from tests.gang import Gang
from tests.live.planned import TOKENS, Tiny
