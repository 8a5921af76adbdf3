"""A server's command line as flags with their values.

moetune does not know every flag of a server, so it reads a command as a person does: a word that begins
with a dash and a letter is a flag, and what follows it up to the next one are its values. Both servers
take a long flag's dashes as underscores too (vllm 0.33.0, `vllm/utils/argparse_utils.py:
FlexibleArgumentParser`), and take the last of two (argparse).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FLAG = re.compile(r"--?[A-Za-z][\w.-]{0,126}", re.A)


@dataclass(frozen=True, slots=True)
class Option:
    """A flag with its values.

    Attributes:
        flag: with its dashes, a long one without underscores; empty for words before the first flag.
        values: what follows it.
    """

    flag: str
    values: tuple[str, ...]


def options_of(arguments: Sequence[str]) -> tuple[Option, ...]:
    """The options of a command, in its order; `--flag=value` is the same as `--flag value`."""
    found: list[Option] = []
    for word in arguments:
        flag = flag_of(word)
        if flag:
            _, equals, value = word.partition("=")
            found.append(Option(flag, (value,) if equals else ()))
        elif found:
            found[-1] = Option(found[-1].flag, (*found[-1].values, word))
        else:
            found.append(Option("", (word,)))
    return tuple(found)


def flag_of(word: str) -> str:
    """The flag that a word of a command is, in one spelling; empty for a value."""
    name = word.partition("=")[0]
    if not _FLAG.fullmatch(name):
        return ""
    return name.replace("_", "-") if name.startswith("--") else name


def last_values(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag to the values that it is given last."""
    return {option.flag: option.values for option in options_of(arguments) if option.flag}
