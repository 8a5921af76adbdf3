"""When two problems are the same one, and in what they differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from moetune.domain.codec import from_json, to_json
from moetune.domain.problem import Problem
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

# A GPU is its name: limits and rates come from a registry that may learn better numbers.
_GPU_FIELDS = ("torch_name", "mig_slice")
_ORDER = [field.name for field in fields(Problem)]


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The problem with all that is known about its GPU."""
    document: dict[str, Any] = to_json(problem)
    return document


def problem_from_json(document: object, source: str) -> Problem:
    """Read a problem back.

    Raises:
        InputError: naming the field that is missing or wrong.
    """
    return from_json(Problem, document, source)


def identity(problem: Problem) -> dict[str, Any]:
    """Everything that makes a problem another one."""
    document = problem_to_json(problem)
    document["gpu"] = {name: document["gpu"][name] for name in _GPU_FIELDS}
    return document


def fingerprint(problem: Problem) -> str:
    """A short name of a problem: equal exactly when the identities are (128 bits of SHA-256)."""
    text = json.dumps(identity(problem), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(here: Mapping[str, Any], there: Mapping[str, Any], limit: int = 4) -> str:
    """In words what differs between two identities: `K is 7168 here and 6144 there`.

    Args:
        here: an identity.
        there: another; it may come from a file, so that nothing of it is trusted.
        limit: fields to name at most.
    """
    names = [name for name in _ORDER if name in here and here[name] != there.get(name)]
    named = [f"{name} is {_shown(here[name])} here and {_shown(there.get(name))} there" for name in names]
    more = [f"{len(named) - limit} more"] if len(named) > limit else []
    return ", ".join(named[:limit] + more)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("torch_name", value)
    return printable(value if isinstance(value, str) else json.dumps(value, default=str), 60)
