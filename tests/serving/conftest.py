"""A real server and a real load generator on this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moetune.applications.experiments.arm_server import ArmServer
from moetune.applications.experiments.command_line import arm_command
from moetune.domain.experiment_plan import LoadPlan, ServerPlan
from tests.serving.made_model import make_model
from tests.wheels import read_member

HERE = Path(__file__).parent
BENCH_RELEASE = "0.5.6"
"""Of SGLang: the last ones are packages that need all of SGLang, this one's generator is a single file."""

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Real:
    """What the tests of a real server need.

    Attributes:
        folder: of everything.
        model: folder of the model, also its name.
        bench: SGLang's load generator.
        extras: modules that it imports and does not need here.
    """

    folder: Path
    model: Path
    bench: Path
    extras: Path

    def config(self, implementation: str) -> str:
        """The config file that has these kernels compute the experts."""
        return str(self.model / f"config.{implementation}.json")

    def server(self, implementation: str) -> ServerPlan:
        """`transformers serve` of the model."""
        return ServerPlan(
            name="other",
            command=(
                *(sys.executable, str(HERE / "serve.py"), "serve", str(self.model)),
                *("--device", "cpu", "--dtype", "float32", "--log-level", "info"),
                *("--host", "127.0.0.1", "--port", "{port}", "--experts", self.config(implementation)),
            ),
            environment=ENVIRONMENT,
            port=free_port(),
            model=str(self.model),
            ready_s=240.0,
            stop_s=20.0,
        )

    def load(
        self, requests: int = 8, input_tokens: int = 8, output_tokens: int = 4, passes: int = 1
    ) -> LoadPlan:
        """SGLang's generator, by way of the completions that all servers have."""
        return LoadPlan(
            "sglang.bench_serving",
            command=(sys.executable, str(self.bench)),
            arguments=("--backend", "vllm"),
            environment={**ENVIRONMENT, "PYTHONPATH": str(self.extras)},
            requests=requests,
            concurrency=2,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            passes=passes,
            limit_s=240.0,
        )

    @contextmanager
    def running(self, plan: ServerPlan, name: str) -> Iterator[ArmServer]:
        """A server that takes requests, and is gone afterwards."""
        with ArmServer.start(plan, arm_command(plan, ()), self.folder, name=name) as server:
            server.wait_ready()
            yield server


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """Model, server and generator; nothing is fetched but SGLang's wheel, which other tests read too."""
    folder = tmp_path_factory.mktemp("serving")
    model, extras = folder / "model", folder / "extras"
    extras.mkdir()
    make_model(model)
    bench = folder / "bench_serving.py"
    bench.write_text(read_member("sglang", BENCH_RELEASE, "sglang/bench_serving.py"))
    # Imported at the top, used for data sets that are downloaded only.
    (extras / "datasets.py").write_text("load_dataset = None\n")
    # A tokenizer needs no torch, whose import takes longer than a pass.
    (extras / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return Real(folder, model, bench, extras)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take minutes: at the end one of them would be waited for."""
    items.sort(key=lambda item: HERE not in item.path.parents)
