"""A config directory, a plan of the stub server and a state directory, for whole experiments in a second."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.applications.install_world import FOLDER, pair, write
from tests.cli.conftest import moetune

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.cli.conftest import Result

HERE = Path(__file__).parent
PYTHON = [sys.executable, "-I", "-S"]
RESULTS = {
    "completed": "completed",
    "requested": "requested",
    "duration_s": "seconds",
    "output_tokens": "tokens",
    "ttft_ms": "ttft",
    "itl_ms": "itl",
}


@dataclass
class World:
    """Where an experiment of the stub takes place.

    Attributes:
        folder: of everything.
        port: first port of its servers.
        flags: of the known-good server.
        variables: of it.
    """

    folder: Path
    port: int
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, object] = field(default_factory=dict)
    load: Mapping[str, object] = field(default_factory=dict)
    budget: Mapping[str, object] = field(default_factory=dict)
    decision: Mapping[str, object] = field(
        default_factory=lambda: {"noise": 0.002, "smallest_effect": 0.05, "alpha": 0.4}
    )

    def __post_init__(self) -> None:
        write(self.root, pair(32, FOLDER))
        write(self.folder / "better", pair(64))
        write(self.folder / "best", pair(128))

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.toml"

    @property
    def runs(self) -> list[Path]:
        return sorted((self.state / "experiments").glob("e*"))

    def journal(self) -> list[dict[str, object]]:
        text = (self.runs[0] / "journal.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def write_plan(self, interventions: Sequence[Mapping[str, object]], seed: int = 1) -> Path:
        """Write a plan with some interventions."""
        server = {
            "name": "sglang",
            "version": "0.5.23",
            "triton_version": "3.6.0",
            "port": self.port,
            "command": [
                *PYTHON,
                str(HERE / "stub_server.py"),
                "--port",
                "{port}",
                *self.flags,
            ],
            "environment": {
                "SGLANG_MOE_CONFIG_DIR": str(self.root),
                "STUB_RUNS": str(self.state / "experiments"),
                "STUB_NOISE": "0.002",
                **self.variables,
            },
            "config_root": str(self.root),
            "gpu": "NVIDIA H200",
            "model": "made-up/moe",
            "tp": 1,
            "ready_s": 10,
            "stop_s": 2,
            **self.server,
        }
        load = {
            "generator": "command",
            "command": [*PYTHON, str(HERE / "stub_load.py"), "{host}", "{port}", "{requests}", "{result}"],
            "requests": 100,
            "output_tokens": 16,
            "limit_s": 5,
            "result": RESULTS,
            **self.load,
        }
        lines = [f'name = "evening"\nseed = {seed}\n', *_table("server", server), *_table("load", load)]
        if self.budget:
            lines += _table("budget", self.budget)
        lines += _table("decision", self.decision)
        for one in interventions:
            lines += _table("intervention", one, double=True)
        self.plan.write_text("\n".join(lines) + "\n")
        return self.plan

    def run(self, *more: str, **variables: str) -> Result:
        """Run the command line on the plan."""
        return moetune(
            "experiment", str(self.plan), "--state", str(self.state), *more, cwd=self.folder, **variables
        )


def _table(name: str, values: Mapping[str, object], *, double: bool = False) -> list[str]:
    lines = [f"[[{name}]]" if double else f"[{name}]"]
    return [*lines, *(f"{key} = {_value(value)}" for key, value in values.items()), ""]


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
