"""`transformers serve` for load generators: `serve.py serve MODEL ... --experts FILE`.

Two things are added to the real server. It ignores request fields that it does not know (`ignore_eos`, which
all generators send) where it would answer 422. And FILE becomes the model's config.json before the start, as
a tuned table is put in place, while the log says which kernels the loaded model really computes with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler
from transformers.cli.transformers import main


def drop_unknown_fields(handler: Any, body: dict[str, Any]) -> None:
    """Take the place of the check that refuses them (transformers 5.24.0)."""
    known = handler._valid_params_class.__mutable_keys__
    for field in set(body) - set(known):
        del body[field]


def put_in_place(config: Path) -> None:
    """Make a config file the one that the model is loaded with, in one step."""
    temporary = config.with_name("config.json.new")
    temporary.write_bytes(config.read_bytes())
    temporary.replace(config.with_name("config.json"))


def say_experts(manager: Any, *arguments: Any, **named: Any) -> Any:
    """Load a model and print what computes its experts."""
    model = load_model(manager, *arguments, **named)
    print(f"experts_implementation={model.config._experts_implementation}", flush=True)  # noqa: T201
    return model


load_model = ModelManager._load_model

if __name__ == "__main__":
    place = sys.argv.index("--experts")
    put_in_place(Path(sys.argv[place + 1]))
    del sys.argv[place : place + 2]
    BaseHandler._validate_request = drop_unknown_fields
    ModelManager._load_model = say_experts
    main()
