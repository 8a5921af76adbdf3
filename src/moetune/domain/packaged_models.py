"""The checkpoints that ship with moetune: the keys of their config.json that matter, as data."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One packaged checkpoint.

    Attributes:
        name: its Hugging Face id.
        config: the keys of its config.json that a reader uses.
        hf_quant_config: the same of its hf_quant_config.json, None without.
        origin: where the keys were taken from.
    """

    name: str
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    origin: str


@lru_cache(maxsize=1)
def packaged_models() -> Mapping[str, PackagedModel]:
    """Every packaged checkpoint by its id, sorted."""
    text = resources.files("moetune.domain").joinpath("data").joinpath("models.json").read_text("utf-8")
    document = json.loads(text)
    origins = document["sources"]
    return {
        name: PackagedModel(name, row["config"], row.get("hf_quant_config"), origins[row["source"]])
        for name, row in sorted(document["checkpoints"].items())
    }


def find_packaged(name: str) -> PackagedModel | None:
    """The packaged checkpoint of that id.

    The id may lack its organisation, and upper and lower case do not matter, where only one
    checkpoint can be meant.
    """
    models = packaged_models()
    if name in models:
        return models[name]
    asked = name.casefold()
    found = [known for known in models if known.casefold() == asked]
    if not found and "/" not in name:
        found = [known for known in models if known.partition("/")[2].casefold() == asked]
    return models[found[0]] if len(found) == 1 else None


def nearest_packaged(name: str, count: int = 3) -> tuple[str, ...]:
    """Ids of packaged checkpoints that a misspelt name may mean, best first."""
    asked = name[:200].casefold()
    whole = {known.casefold(): known for known in packaged_models()}
    # A quantized or fine-tuned copy lives under another organisation: its last part says most.
    tails = {known.casefold().rpartition("/")[2]: known for known in packaged_models()}
    close = [whole[match] for match in difflib.get_close_matches(asked, whole, count, 0.6)]
    close += [tails[m] for m in difflib.get_close_matches(asked.rpartition("/")[2], tails, count, 0.6)]
    return tuple(dict.fromkeys(close))[:count]
