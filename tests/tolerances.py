"""The tolerances of the measuring layer, for tests of kernels."""

from __future__ import annotations

from moetune.measure.tolerance import RELATIVE_ERROR

__all__ = ["RELATIVE_ERROR"]
