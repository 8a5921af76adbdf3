"""How far a problem lies from what the performance model has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Familiarity:
    """How far a problem lies from what the model has seen.

    Attributes:
        distance: 0 on known ground, 1 and more far from it.
        text: the same in words.
    """

    distance: float
    text: str
