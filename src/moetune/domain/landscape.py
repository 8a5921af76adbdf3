"""A landscape: recorded times of the configs of one problem, one CSV with the facts beside it in JSON.

`NAME.csv.gz` holds one row a (kernel, m, config), `NAME.json` the problem and the protocol. A row
without a time is a config that could not run.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.safe_json import load_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CONFIG_COLUMNS = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages")
_COLUMNS = (*_CONFIG_COLUMNS, "kernel", "m", "median_us")
MAX_BYTES = 256 << 20
"""What a landscape may expand to: a hundred times the largest recorded one."""


@dataclass(frozen=True, slots=True)
class Landscape:
    """Recorded times of one problem.

    Attributes:
        name: the file's name without its endings.
        problem: what was measured.
        facts: the JSON beside it, as read.
        times_us: `(kernel, m)` to config to median time in microseconds; None: it could not run.
        second_us: the same of a second pass on other routings, where there was one: what is chosen on the
            first can be judged on it.
    """

    name: str
    problem: Problem
    facts: Mapping[str, Any]
    times_us: Mapping[tuple[Kernel, int], Mapping[KernelConfig, float | None]]
    second_us: Mapping[tuple[Kernel, int], Mapping[KernelConfig, float]] = field(default_factory=dict)


def read_landscape(path: Path) -> Landscape:
    """Read `NAME.csv.gz` (or `NAME.csv`) and `NAME.json` beside it.

    Raises:
        InputError: when a file is missing, broken, too large, or lacks a column.
    """
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    facts_path = path.with_name(f"{name}.json")
    try:
        facts = load_json_object(facts_path.read_bytes(), str(facts_path))
        text = _expanded(path).decode("utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"{printable(str(error.filename), 400)} does not exist",
            "a landscape is NAME.csv.gz with NAME.json beside it",
        ) from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = printable(getattr(error, "strerror", None) or str(error), 200)
        raise InputError(f"{printable(str(path), 400)} cannot be read: {reason}") from error
    times, second = _times(text, str(path))
    return Landscape(name, _problem(facts, str(facts_path)), facts, times, second)


def _expanded(path: Path) -> bytes:
    if path.suffix != ".gz":
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{printable(str(path), 400)} is larger than {MAX_BYTES >> 20} MiB")
        return path.read_bytes()
    with gzip.open(path, "rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(f"{printable(str(path), 400)} expands to more than {MAX_BYTES >> 20} MiB")
    return data


def _problem(facts: Mapping[str, Any], source: str) -> Problem:
    """The problem that the facts describe; E, K and N are those of one rank."""

    def whole(key: str, default: int | None = None) -> int:
        value = facts.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise InputError(f"{printable(source, 400)}: {key!r} must be a positive whole number")
        return value

    def text(key: str, default: str) -> str:
        value = facts.get(key, default)
        if not isinstance(value, str):
            raise InputError(f"{printable(source, 400)}: {key!r} must be a text")
        return value

    def flag(key: str) -> bool:
        value = facts.get(key, False)
        if not isinstance(value, bool):
            raise InputError(f"{printable(source, 400)}: {key!r} must be true or false")
        return value

    tag = text("dtype", "bf16")
    if tag not in {dtype.value for dtype in Dtype}:
        raise InputError(f"{printable(source, 400)}: no dtype is called {printable(tag, 40)!r}")
    dtype = Dtype(tag)
    shape = facts.get("block_shape")
    if shape is not None and not (
        isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    ):
        raise InputError(f"{printable(source, 400)}: 'block_shape' must be null or two whole numbers")
    experts = whole("num_experts")
    width = whole("intermediate_per_rank")
    plain = dtype.weight_bits >= 16
    dynamic = None if plain or dtype in {Dtype.INT8_W8A16, Dtype.INT4_W4A16} else True
    return Problem(
        E=experts,
        global_experts=whole("global_experts", experts),
        topk=whole("topk"),
        K=whole("hidden_size"),
        N=width,
        file_n=width,
        gpu=find_gpu(text("device", ""), compute_capability=text("compute_capability", "") or None),
        server=text("server", "sglang"),
        server_version=text("server_version", "0.5.23"),
        triton_version=text("triton", ""),
        ep=whole("ep", 1),
        activation_dtype=dtype if plain else Dtype.BF16,
        quantization=Quantization(
            dtype=dtype,
            block_shape=(shape[0], shape[1]) if shape else None,
            group_size=None if facts.get("group_size") is None else whole("group_size"),
            per_channel=flag("per_channel"),
            dynamic_activation=dynamic,
            zero_point=flag("zero_point"),
        ),
    )


def _whole_m(text: str) -> int:
    m = int(text)
    if m < 1:
        raise ValueError(f"{m} is no number of tokens")
    return m


def _time_us(text: str) -> float | None:
    if not text:
        return None
    time_us = float(text)
    if not (math.isfinite(time_us) and time_us > 0):
        raise ValueError(f"{time_us} is no time")
    return time_us


_Times = dict[tuple[Kernel, int], dict[KernelConfig, "float | None"]]
_SecondTimes = dict[tuple[Kernel, int], dict[KernelConfig, float]]


def _times(text: str, source: str) -> tuple[_Times, _SecondTimes]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"{printable(source, 400)} lacks the columns {', '.join(missing)}")
    times: _Times = {}
    second: _SecondTimes = {}
    kernels: dict[str, Kernel] = {kernel: kernel for kernel in KERNELS}
    try:
        for row in reader:
            key = (kernels[row["kernel"]], _whole_m(row["m"]))
            m, n, k, group, warps, stages = (int(row[column]) for column in _CONFIG_COLUMNS)
            config = KernelConfig(m, n, k, group, warps, stages)
            times.setdefault(key, {})[config] = _time_us(row["median_us"])
            if (again_us := _time_us(row.get("second_us") or "")) is not None:
                second.setdefault(key, {})[config] = again_us
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"{printable(source, 400)}, line {reader.line_num}: {printable(str(error), 100)}"
        ) from error
    if not times:
        raise InputError(f"{printable(source, 400)} holds no times")
    return times, second
