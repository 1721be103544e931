"""The dtypes that can be asked for."""

from __future__ import annotations

from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
