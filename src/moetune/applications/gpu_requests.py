"""Requests to a measuring process that no target stands for: a layer, a check, peaks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class RequestTag:
    """What a request is known by while a GPU works on it."""

    number: int


class Requests:
    """Requests, answered on whatever GPU is free.

    Attributes:
        answers: what has come, by number.
    """

    def __init__(self) -> None:
        self.answers: dict[int, object] = {}
        self._bodies: list[object] = []
        self._waiting: deque[int] = deque()

    def __bool__(self) -> bool:
        return len(self.answers) < len(self._bodies)

    def add(self, bodies: Sequence[object]) -> range:
        """Take requests; their numbers."""
        numbers = range(len(self._bodies), len(self._bodies) + len(bodies))
        self._bodies += bodies
        self._waiting += numbers
        return numbers

    def take(self) -> tuple[RequestTag, object] | None:
        """The request that comes next."""
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        return RequestTag(number), self._bodies[number]

    def put_back(self, tag: RequestTag) -> None:
        """The GPU that worked on a request is gone: it comes next again."""
        self._waiting.appendleft(tag.number)
