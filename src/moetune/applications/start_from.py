"""The configs of files from elsewhere, as further candidates of a search."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.applications.config_files import Unreadable, discover, read_config
from moetune.applications.file_meaning import guess_server
from moetune.applications.lint_file import FileJudge
from moetune.domain.errors import InputError
from moetune.domain.text import printable
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from moetune.domain.config import KernelConfig

MAX_CONFIGS = 512


def configs_of(paths: Iterable[Path]) -> tuple[KernelConfig, ...]:
    """Every config of some files, each once, without launch options and USE_TMA.

    Whether a config fits the problem at hand is the search's to say.

    Args:
        paths: config files of any server, or directories of them.

    Raises:
        InputError: for a file that cannot be read, or files without entries.
    """
    found: dict[KernelConfig, None] = {}
    files = discover(paths).files
    for path in files:
        content = read_config(path)
        if isinstance(content, Unreadable):
            raise InputError(
                f"{printable(str(path), 400)} cannot be read: {content.reason}", "name config files"
            )
        guess = guess_server([path], {path: content})
        judge = FileJudge(open_server(guess[0] if guess else "sglang"), max_m=1)
        table = judge.judge(path.name, str(path), content).table
        found |= {replace(config, extra=(), use_tma=False): None for _, config in table.entries}
    if not found:
        raise InputError(
            "the files to start from hold no entries", "moetune lint says what is wrong with them"
        )
    if len(found) > MAX_CONFIGS:
        raise InputError(
            f"the files to start from hold {len(found)} different configs, more than {MAX_CONFIGS}",
            "name the files of nearby problems only: moetune borrow --list MODEL",
        )
    return tuple(found)
