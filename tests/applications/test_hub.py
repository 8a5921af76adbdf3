"""The hub through `huggingface_hub` itself, against a hub of our own on this machine."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants

from moetune.applications.checkpoints import resolve
from moetune.applications.hub import MAX_FILE_BYTES, HubUnreachableError, HuggingFaceHub
from moetune.domain.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = json.dumps(
    {
        "architectures": ["SomethingNewForCausalLM"],
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "hidden_size": 2048,
        "moe_intermediate_size": 1408,
        "auto_map": {"AutoConfig": "evil.Config"},
    }
).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Answers as the hub's `resolve` does, and remembers the paths it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {"/good/moe/resolve/main/config.json": CONFIG}
        self.sizes: dict[str, int] = {}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.server.asked.append(self.path)
        owner = self.path.split("/")[1]
        data = self.server.files.get(self.path)
        if data is None:
            code, status = {
                "gated": ("GatedRepo", 403),
                "good": ("EntryNotFound", 404),
            }.get(owner, ("RepoNotFound", 401))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(data)):040x}"')
        self.send_header("Content-Length", str(self.server.sizes.get(self.path, len(data))))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    hub = HubServer()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    _point_at(f"http://127.0.0.1:{hub.server_address[1]}", tmp_path, monkeypatch)
    yield hub
    hub.shutdown()
    hub.server_close()


def _point_at(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # So that the client's own requests, if it makes any, are made in every test and not only in the first.
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(folder / "harnesses.json"), raising=False)
    agents = sys.modules.get("huggingface_hub.utils._detect_agent", constants)
    monkeypatch.setattr(agents, "_registry", None, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_model_is_fetched_once_and_then_comes_from_the_cache(server: HubServer) -> None:
    layer = resolve("good/moe")
    assert layer.num_experts == 64
    assert layer.source == "hub: good/moe"
    # And nothing else, no telemetry of the client either.
    assert {path.rpartition("/")[2] for path in server.asked} == {"config.json", "hf_quant_config.json"}
    assert {path.split("/")[1] for path in server.asked} == {"good"}
    asked = len(server.asked)
    assert resolve("good/moe").source == "hub cache: good/moe"
    assert resolve("good/moe", offline=True).source == "hub cache: good/moe"
    assert len(server.asked) == asked


def test_modelopts_file_is_fetched_too(server: HubServer) -> None:
    quant = b'{"quantization": {"quant_algo": "NVFP4"}}'
    server.files["/good/moe/resolve/main/hf_quant_config.json"] = quant
    assert resolve("good/moe").quantization.method == "modelopt"
    assert resolve("good/moe", offline=True).quantization.method == "modelopt"


def test_offline_sends_nothing(server: HubServer) -> None:
    with pytest.raises(ModelError, match="no network"):
        resolve("good/moe", offline=True)
    assert server.asked == []


def test_packaged_models_send_nothing(server: HubServer) -> None:
    assert resolve("Qwen/Qwen3.5-122B-A10B").num_experts == 256
    assert server.asked == []


def test_an_unknown_repository(server: HubServer) -> None:
    with pytest.raises(ModelError, match="knows no model nobody/nothing"):
        resolve("nobody/nothing")
    assert len(server.asked) == 1


@pytest.mark.usefixtures("server")
def test_a_gated_repository() -> None:
    with pytest.raises(ModelError, match="gated") as caught:
        resolve("gated/moe")
    assert "hf auth login" in (caught.value.hint or "")


def test_a_repository_without_config_json(server: HubServer) -> None:
    server.files.clear()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve("good/moe")


def test_a_huge_file_is_not_downloaded(server: HubServer) -> None:
    path = "/good/moe/resolve/main/config.json"
    server.sizes[path] = MAX_FILE_BYTES + 1
    with pytest.raises(ModelError, match="16777217 bytes"):
        resolve("good/moe")
    assert server.asked.count(path) == 1


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _point_at(f"http://127.0.0.1:{port}", tmp_path, monkeypatch)
    with pytest.raises(HubUnreachableError, match="cannot be reached"):
        resolve("good/moe")


@pytest.mark.timeout(60)
def test_a_hub_that_never_answers_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _point_at(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        for hub in (
            HuggingFaceHub(timeout_s=0.5, deadline_s=30),
            HuggingFaceHub(timeout_s=300, deadline_s=0.5),
        ):
            with pytest.raises(HubUnreachableError, match="cannot be reached"):
                resolve("good/moe", hub=hub)


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve("Qwen/Qwen3.5-122B-A10B").num_experts == 256
    with pytest.raises(HubUnreachableError, match="not installed") as caught:
        resolve("good/moe")
    assert "pip install moetune[hub]" in (caught.value.hint or "")
