"""Files and directories as a caller names them: one, or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, Union

AnyPath: TypeAlias = Union[str, "os.PathLike[str]"]
AnyPaths: TypeAlias = AnyPath | Sequence[AnyPath]
"""A path, or several."""


def as_paths(given: AnyPaths) -> tuple[Path, ...]:
    """The paths in the order given."""
    if isinstance(given, (str, os.PathLike)):
        return (Path(given),)
    return tuple(Path(path) for path in given)
