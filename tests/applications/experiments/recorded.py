"""Starts of the recorded server of `examples/evening`, as the tests of experiments need them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.experiments.facts import read_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moetune.domain.experiment import ServerFacts

EVENING = Path(__file__).parents[3] / "examples" / "evening"
RELEASES = ("sglang-0.5.9", "sglang-0.5.12", "sglang-0.5.23", "vllm-0.33.0")
SGLANG = RELEASES[:3]
DEVICE = "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
FILE = f"E=256,N=256,device_name={DEVICE}.json"
DOWN = f"E=256,N=256,device_name={DEVICE}_down.json"
TRITON = {"sglang-0.5.9": "3_5_1", "sglang-0.5.12": "3_6_0", "sglang-0.5.23": "3_8_0"}
VARIABLE = {"sglang": "SGLANG_MOE_CONFIG_DIR", "vllm": "VLLM_TUNED_CONFIG_FOLDER"}
COMMANDS = {
    "sglang": ("--model-path", "Qwen/Qwen3.5-122B-A10B", "--tp-size", "4"),
    "vllm": (
        *("--model", "Qwen/Qwen3.5-122B-A10B", "--tensor-parallel-size", "4"),
        *("--moe-backend", "triton", "--max-num-seqs", "48"),
    ),
}
LIMIT_S = 20.0


def config_folder(release: str, root: Path) -> Path:
    """Where that release reads the files of a root."""
    return root / "configs" / f"triton_{TRITON[release]}" if release in TRITON else root


def entry(block_m: int = 16, block_k: int = 128, group_m: int = 16) -> dict[str, int]:
    """A config whose tiles the recordings know."""
    return {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": 32,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": group_m,
        "num_warps": 4,
        "num_stages": 3,
    }


def write_configs(release: str, root: Path, **tile: int) -> list[str]:
    """Put a table in place for a release; the paths of the files, as its log names them."""
    folder = config_folder(release, root)
    folder.mkdir(parents=True, exist_ok=True)
    names = [FILE, DOWN] if release in TRITON else [FILE]
    for name in names:
        (folder / name).write_text(json.dumps({"16": entry(**tile), "8192": entry(block_m=64, block_k=32)}))
    return [str(folder / name) for name in names]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A recorded server that is ready, or that has ended."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def facts(self, server: str, looked_for: Sequence[str] = (), *, endpoint: bool = True) -> ServerFacts:
        """What it runs."""
        return read_facts(server, self.log, self.url if endpoint else None, looked_for)

    def one_pass(self, requests: int = 512, concurrency: int = 48) -> dict[str, Any]:
        """What the load generator would write."""
        result = self.log.with_suffix(".json")
        command = [sys.executable, str(EVENING / "recorded_load.py"), "--url", self.url]
        for name, value in (("requests", requests), ("concurrency", concurrency)):
            command += [f"--{name}", str(value)]
        command += ["--input-tokens", "1024", "--output-tokens", "256", "--result", str(result)]
        subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
        document: dict[str, Any] = json.loads(result.read_text())
        return document


@contextmanager
def start(
    release: str,
    folder: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    configs: Path | None = None,
    seed: int = 1,
) -> Iterator[Running]:
    """Start a recorded server and wait until it is ready or ends; it is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = release.partition("-")[0]
    port = free_port()
    log = folder / f"start-{len(list(folder.glob('start-*.log')))}.log"
    command = [
        *(sys.executable, str(EVENING / "recorded_server.py")),
        *("--recording", str(EVENING / "recordings" / f"{release}.json")),
        *("--log", str(log), "--seed", str(seed), "--"),
        *COMMANDS[server],
        *("--port", str(port)),
        *arguments,
    ]
    environ = {**os.environ, **(variables or {})}
    if configs is not None:
        environ[VARIABLE[server]] = str(configs)
    log.touch()
    process = subprocess.Popen(command, env=environ)
    running = Running(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait(running)
        yield running
    finally:
        process.kill()
        process.wait(LIMIT_S)


def _wait(running: Running) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + LIMIT_S
    while running.process.poll() is None:
        assert time.monotonic() < until, f"never ready: {running.log.read_text()[-2000:]}"
        try:
            with opener.open(f"{running.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.03)
