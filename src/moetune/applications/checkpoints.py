"""From what a person calls a model to its expert layer: a path, a packaged checkpoint, the hub.

The order is: a path that exists; the packaged checkpoints; the hub's cache on this machine; the
network. What is packaged stands before the cache, so that the same command gives the same bytes on
every machine, and a packaged model is never slower offline.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.hub import MAX_FILE_BYTES, Hub, HubUnreachableError, HuggingFaceHub, is_hub_id
from moetune.domain.errors import ModelError
from moetune.domain.model import NO_OVERRIDES, ExpertLayer, LayerOverrides, read_expert_layer
from moetune.domain.packaged_models import find_packaged, nearest_packaged
from moetune.domain.quantization_config import names_modelopt_only
from moetune.domain.safe_json import JsonLimits, load_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

# Real config.json files hold infinities (Nemotron-H: time_step_limit), which the servers accept.
_LIMITS = JsonLimits(max_bytes=MAX_FILE_BYTES, max_depth=64, non_finite=True)
_MAX_NAME = 4096


def resolve(
    model: str | None,
    *,
    offline: bool = False,
    overrides: LayerOverrides = NO_OVERRIDES,
    hub: Hub | None = None,
) -> ExpertLayer:
    """Find and read the expert layer of a model.

    Args:
        model: a config.json or its folder, a packaged checkpoint, a Hugging Face id; None when all
            sizes are given by hand.
        offline: ask no network.
        overrides: what is given by hand; with all four sizes no config is needed.
        hub: where ids are looked up; the Hugging Face hub by default.

    Raises:
        ModelError: for a model that is unknown, unreachable, dense or ambiguous.
    """
    if model is None:
        return _by_hand("", overrides)
    _check_name(model)
    path = _existing(model)
    if path is not None:
        return _read_path(path, model, overrides)
    packaged = find_packaged(model)
    if packaged is not None:
        return read_expert_layer(
            packaged.config,
            name=model,
            source="packaged" if packaged.name == model else f"packaged: {packaged.name}",
            overrides=overrides,
            hf_quant_config=packaged.hf_quant_config,
        )
    if model.startswith((".", "/", "~")) or model.endswith(".json") or not is_hub_id(model):
        if overrides.complete:
            return _by_hand(model, overrides)
        raise _unknown(model, "there is no such file or folder, and it is no id of a model on the hub")
    return _from_hub(model, hub or HuggingFaceHub(), offline, overrides)


def _by_hand(model: str, overrides: LayerOverrides) -> ExpertLayer:
    if not overrides.complete:
        raise ModelError(
            f"without a model the sizes are given by hand; missing: {', '.join(overrides.missing)}",
            "moetune plan --experts 256 --topk 8 --hidden 3072 --intermediate 1024",
        )
    return read_expert_layer({}, name=model or "by hand", source="by hand", overrides=overrides)


def _check_name(model: str) -> None:
    if not model.strip() or len(model) > _MAX_NAME:
        raise ModelError(f"a model's name of {len(model)} characters", "moetune plan Qwen/Qwen3-30B-A3B")
    if any(unicodedata.category(character)[0] == "C" for character in model) or len(model.splitlines()) > 1:
        raise ModelError(f"the model's name holds control characters: {printable(model)!r}")


# --- paths ------------------------------------------------------------------------------------------


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser() if model.startswith("~") else Path(model)
        path.stat()
    except (OSError, ValueError, RuntimeError):  # the last: the home of nobody
        return None
    return path


def _read_path(path: Path, model: str, overrides: LayerOverrides) -> ExpertLayer:
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ModelError(
            f"the folder {printable(model)} holds no config.json",
            "pass the folder of a checkpoint, or the file itself; if an id is meant, call it from elsewhere",
        )
    config = _read_json(file)
    beside = path / "hf_quant_config.json" if path.is_dir() else path.with_name("hf_quant_config.json")
    # Another file's name may be anything: only config.json stands beside its own ModelOpt file.
    read_beside = file.name == "config.json" and _may_have_quant_file(config) and beside.exists()
    return read_expert_layer(
        config,
        name=model,
        source=printable(str(file)),
        overrides=overrides,
        hf_quant_config=_read_json(beside) if read_beside else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a regular file of limited size: no device, pipe or socket is ever opened for reading."""
    shown = printable(str(path))
    try:
        # Without blocking: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{shown} is no regular file", "pass a config.json")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise ModelError(f"{shown} cannot be read: {failure.strerror}") from None
    return load_json_object(data, shown, _LIMITS, ModelError)


# --- the hub ----------------------------------------------------------------------------------------


def _from_hub(model: str, hub: Hub, offline: bool, overrides: LayerOverrides) -> ExpertLayer:
    source = f"hub cache: {model}"
    config_file, quant_file = hub.cached(model, "config.json"), hub.cached(model, "hf_quant_config.json")
    if config_file is None:
        if overrides.complete:
            return _by_hand(model, overrides)
        if offline:
            raise _unknown(model, "it is neither packaged nor in the hub's cache, and no network is asked")
        source = f"hub: {model}"
        # This one first: a config.json in the cache then means that this question was answered too.
        quant_file = _fetch(model, hub, "hf_quant_config.json")
        config_file = _fetch(model, hub, "config.json")
        if config_file is None:
            raise _unknown(model, "its repository on the hub holds no config.json")
    config = _read_json(config_file)
    read_quant = quant_file is not None and _may_have_quant_file(config)
    return read_expert_layer(
        config,
        name=model,
        source=source,
        overrides=overrides,
        hf_quant_config=_read_json(quant_file) if read_quant and quant_file is not None else None,
    )


def _may_have_quant_file(config: Mapping[str, Any]) -> bool:
    """Whether ModelOpt's own file may say what config.json does not.

    Older ModelOpt checkpoints (nvidia/DeepSeek-V3.1-NVFP4) say nothing about it in config.json:
    without that file they would be taken for bf16. Others name the method there and nothing else.
    """
    nested = [config, *(value for value in config.values() if isinstance(value, dict))]
    said = [part[k] for part in nested for k in ("quantization_config", "compression_config") if part.get(k)]
    return not said or any(names_modelopt_only(quant) for quant in said)


def _fetch(model: str, hub: Hub, filename: str) -> Path | None:
    try:
        return hub.fetch(model, filename)
    except HubUnreachableError as failure:
        raise HubUnreachableError(failure.message, _hint(model, failure.hint)) from None
    except ModelError as failure:
        raise ModelError(failure.message, _hint(model, failure.hint)) from None


def _unknown(model: str, why: str) -> ModelError:
    return ModelError(f"{printable(model)} is not known: {why}", _hint(model, None))


def _hint(model: str, first: str | None) -> str:
    near = nearest_packaged(model)
    parts = [
        *([f"packaged and near: {', '.join(near)}"] if near else []),
        first or "pass the path of a config.json, or `pip install moetune[hub]` to have it fetched",
        "or give the numbers by hand: --experts E --topk T --hidden K --intermediate N",
    ]
    return "; ".join(parts)
