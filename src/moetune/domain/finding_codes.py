"""The codes of findings, from packaged data: `data/*_codes.json`."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError
from moetune.domain.findings import Code, Severity
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUFFIX = "_codes.json"


@lru_cache(maxsize=1)
def all_codes() -> Mapping[str, Code]:
    """Every code by its name, sorted."""
    codes: dict[str, Code] = {}
    for file in resources.files("moetune.domain").joinpath("data").iterdir():
        if not file.name.endswith(_SUFFIX):
            continue
        for row in json.loads(file.read_text("utf-8")):
            name = row["code"]
            if name in codes:
                raise ValueError(f"{name} stands twice in the packaged codes")
            codes[name] = Code(name, row["title"], Severity(row["severity"]), row["story"])
    return dict(sorted(codes.items()))


def find_code(name: str) -> Code:
    """A code by its name, in any case.

    Raises:
        InputError: for a name that no code has.
    """
    code = all_codes().get(name.strip().upper())
    if code is None:
        raise InputError(f"{printable(name, 40)!r} is no code of moetune", "moetune explain lists them all")
    return code
