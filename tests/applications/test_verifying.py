"""The call itself: the same answer twice, and requests that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.verify_answer import VerifyRequest
from moetune.applications.verifying import verify
from moetune.domain.errors import InputError
from tests.applications.verify_world import (
    DOWN,
    GOOD_DOWN,
    GOOD_UP,
    UP,
    lay,
    request,
)


def test_equal_calls_answer_alike(tmp_path: Path) -> None:
    lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    first, second = (verify(request(tmp_path), {}, gpus=()).to_json() for _ in range(2))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"paths": ()},
        {"lookup_only": True, "require_gpu": True},
        {"lookup_only": True, "devices": (0,)},
        {"devices": (0, 0)},
        {"tp": 2},
        {"model": "Qwen/Qwen3-30B-A3B", "hidden": 2048},
        {"max_m": 0},
        {"seed": -1},
    ],
)
def test_senseless_requests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        VerifyRequest(**{"paths": (Path("x"),), **changes})
