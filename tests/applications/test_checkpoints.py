"""What a user may call a model, in which order it is looked for, and what bad input says."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.checkpoints import resolve
from moetune.applications.hub import HubUnreachableError, is_hub_id
from moetune.domain.errors import ModelError, MoetuneError
from moetune.domain.model import LayerOverrides
from moetune.domain.packaged_models import packaged_models
from moetune.domain.quantization import Dtype
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "architectures": ["SomethingNewForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
}
BY_HAND = LayerOverrides(experts=8, topk=2, hidden=512, intermediate=256)


class FakeHub:
    """A hub of files in memory that remembers what it was asked."""

    def __init__(
        self,
        folder: Path,
        cached: Mapping[str, str] | None = None,
        online: Mapping[str, str] | None = None,
        failure: ModelError | None = None,
    ) -> None:
        self.asked: list[str] = []
        self._cached = {
            name: _write(folder / f"cached-{name}", text) for name, text in (cached or {}).items()
        }
        self._online = {
            name: _write(folder / f"online-{name}", text) for name, text in (online or {}).items()
        }
        self._failure = failure

    def cached(self, repo: str, filename: str) -> Path | None:
        del repo
        return self._cached.get(filename)

    def fetch(self, repo: str, filename: str) -> Path | None:
        self.asked.append(f"{repo}/{filename}")
        if self._failure is not None:
            raise self._failure
        return self._online.get(filename)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


class NoHub:
    """A hub that must not be asked."""

    def cached(self, repo: str, filename: str) -> Path | None:
        raise AssertionError(f"the cache was asked for {filename} of {repo}")

    def fetch(self, repo: str, filename: str) -> Path | None:
        raise AssertionError(f"the network was asked for {filename} of {repo}")


# --- paths ------------------------------------------------------------------------------------------


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    file = _write(tmp_path / "config.json", json.dumps(CONFIG))
    for path in (tmp_path, file):
        layer = resolve(str(path), hub=NoHub())
        assert (layer.num_experts, layer.topk, layer.hidden_size, layer.intermediate_size) == (
            64,
            6,
            2048,
            1408,
        )
        assert layer.source == str(file)
        assert layer.model == str(path)


def test_a_path_stands_before_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3.5-122B-A10B").mkdir(parents=True)
    _write(tmp_path / "Qwen" / "Qwen3.5-122B-A10B" / "config.json", json.dumps(CONFIG))
    assert resolve("Qwen/Qwen3.5-122B-A10B", hub=NoHub()).num_experts == 64


def test_modelopts_file_beside_counts_when_config_json_says_nothing(tmp_path: Path) -> None:
    quant = json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    _write(tmp_path / "hf_quant_config.json", quant)
    _write(tmp_path / "config.json", json.dumps(CONFIG))
    assert resolve(str(tmp_path)).quantization.dtype is Dtype.NVFP4
    assert resolve(str(tmp_path / "config.json")).quantization.dtype is Dtype.NVFP4
    fp8 = {**CONFIG, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    _write(tmp_path / "config.json", json.dumps(fp8))
    assert resolve(str(tmp_path)).quantization.dtype is Dtype.FP8_W8A8
    other = _write(tmp_path / "other.json", json.dumps(CONFIG))
    assert resolve(str(other)).quantization.dtype is Dtype.BF16


def test_a_folder_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path), hub=NoHub())


@pytest.mark.parametrize(
    "name",
    [
        "./nothing/config.json",
        "/nothing/here",
        "nothing/config.json",
        "~/nothing",
        "~0",
        "../nothing-of-that-name",
    ],
)
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="no such file"):
        resolve(name, hub=NoHub())


def test_case_38_infinities_where_nothing_reads_them_are_accepted(tmp_path: Path) -> None:
    # Nemotron-H's config.json holds "time_step_limit": [0.0, Infinity].
    text = json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text
    assert resolve(str(_write(tmp_path / "config.json", text))).num_experts == 64


DEEP = 100_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"num_experts": 64, "num_experts": 128}', "twice.*num_experts"),
        (b'{"hidden_size": NaN, ' + json.dumps(CONFIG).encode()[1:], "twice"),
        (json.dumps({**CONFIG, "hidden_size": float("nan")}).encode(), "hidden_size is 'nan'"),
        (json.dumps({**CONFIG, "hidden_size": float("inf")}).encode(), "hidden_size is 'inf'"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "10000 digits"),
        (b"[" * DEEP, "nested deeper"),
        (b'{"text_config":' * DEEP + b"1" + b"}" * DEEP, "nested deeper"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b'{"architectures": "' + b"x" * (17 << 20) + b'"}', "larger than"),
    ],
    ids=range(14),
)
def test_case_38_broken_files_are_errors_that_name_the_file(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(str(path), hub=NoHub())
    assert len(caught.value.message) < 500


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in the file system")
@pytest.mark.timeout(30)
def test_pipes_sockets_and_devices_are_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="no regular file"):
        resolve(str(pipe))
    with pytest.raises(ModelError, match="no regular file"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match="no regular file"):
        resolve("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(ModelError):
            resolve(str(tmp_path / "s"))


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    loop = tmp_path / "config.json"
    loop.symlink_to(loop)
    with pytest.raises(ModelError):
        resolve(str(tmp_path))


def test_a_checkpoint_of_the_hubs_cache_is_a_folder_of_links(tmp_path: Path) -> None:
    blob = _write(tmp_path / "blob", json.dumps(CONFIG))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to(blob)
    assert resolve(str(snapshot)).num_experts == 64


# --- packaged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [False, True])
def test_packaged_models_ask_neither_cache_nor_network(offline: bool) -> None:
    for name in packaged_models():
        layer = resolve(name, offline=offline, hub=NoHub())
        assert layer.model == name
        assert layer.source == "packaged"


def test_a_shortened_name_says_what_it_was_taken_for() -> None:
    layer = resolve("qwen3.5-122b-a10b", hub=NoHub())
    assert layer.source == "packaged: Qwen/Qwen3.5-122B-A10B"
    assert layer.model == "qwen3.5-122b-a10b"
    assert layer.num_experts == 256


def test_overrides_reach_a_packaged_model() -> None:
    layer = resolve(
        "Qwen/Qwen3.5-122B-A10B", hub=NoHub(), overrides=LayerOverrides(topk=4, quant="fp8-block")
    )
    assert (layer.topk, layer.quantization.block_shape) == (4, (128, 128))
    assert layer.architecture == "Qwen3_5MoeForConditionalGeneration"


# --- the hub ----------------------------------------------------------------------------------------


def test_the_cache_comes_before_the_network(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, cached={"config.json": json.dumps(CONFIG)})
    for offline in (False, True):
        layer = resolve("someone/new-moe", offline=offline, hub=hub)
        assert layer.source == "hub cache: someone/new-moe"
    assert hub.asked == []


def test_only_the_two_config_files_are_fetched(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, online={"config.json": json.dumps(CONFIG)})
    layer = resolve("someone/new-moe", hub=hub)
    assert layer.source == "hub: someone/new-moe"
    assert set(hub.asked) == {"someone/new-moe/config.json", "someone/new-moe/hf_quant_config.json"}
    # ModelOpt's file first: a config.json in the cache then means that this was asked too.
    assert hub.asked[-1].endswith("/config.json")


@pytest.mark.parametrize("place", ["cached", "online"])
def test_modelopts_file_from_the_hub(tmp_path: Path, place: str) -> None:
    files = {
        "config.json": json.dumps(CONFIG),
        "hf_quant_config.json": '{"quantization": {"quant_algo": "FP8"}}',
    }
    hub = FakeHub(tmp_path, **{place: files})  # type: ignore[arg-type]
    assert resolve("someone/new-moe", hub=hub).quantization.dtype is Dtype.FP8_W8A8


def test_offline_asks_no_network_and_offers_what_is_near(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, online={"config.json": json.dumps(CONFIG)})
    with pytest.raises(ModelError, match="no network is asked") as caught:
        resolve("unsloth/Qwen3-30B-A3B", offline=True, hub=hub)
    assert hub.asked == []
    hint = caught.value.hint or ""
    assert "Qwen/Qwen3-30B-A3B" in hint
    assert "config.json" in hint
    assert "moetune[hub]" in hint
    assert "--experts" in hint


def test_an_unreachable_hub_offers_the_same(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, failure=HubUnreachableError("no answer", "pass a path"))
    with pytest.raises(HubUnreachableError, match="no answer") as caught:
        resolve("Qwen/Qwen3.5-122B-A10", hub=hub)
    assert len(hub.asked) == 1
    hint = caught.value.hint or ""
    assert "Qwen/Qwen3.5-122B-A10B" in hint
    assert "pass a path" in hint
    assert "--experts" in hint


def test_a_repository_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve("someone/weights-only", hub=FakeHub(tmp_path))


def test_a_broken_file_from_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not JSON"):
        resolve("someone/broken", hub=FakeHub(tmp_path, online={"config.json": "<html>"}))


# --- by hand ----------------------------------------------------------------------------------------


def test_without_a_model_all_sizes_are_needed() -> None:
    layer = resolve(None, overrides=BY_HAND, hub=NoHub())
    assert (layer.num_experts, layer.topk, layer.hidden_size, layer.intermediate_size) == (8, 2, 512, 256)
    assert layer.source == "by hand"
    with pytest.raises(ModelError, match="--topk, --hidden") as caught:
        resolve(None, overrides=LayerOverrides(experts=8, intermediate=256), hub=NoHub())
    assert "--experts 256" in (caught.value.hint or "")


def test_an_unknown_model_with_all_sizes_asks_no_network(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert resolve("someone/secret", overrides=BY_HAND, hub=hub).num_experts == 8
    assert resolve("/not/there", overrides=BY_HAND, hub=hub).num_experts == 8
    assert hub.asked == []


# --- names ------------------------------------------------------------------------------------------


CONTROLS = ["a\x1b[31mb", "a\nb", "a\x00b", "a\u202eb", "a\u2028b", "\ud800"]


@pytest.mark.parametrize("name", ["", "  ", "x" * 10_000, *CONTROLS])
def test_names_that_no_model_has_are_refused(name: str) -> None:
    with pytest.raises(
        ModelError, match="control characters" if name in CONTROLS else "characters"
    ) as caught:
        resolve(name, hub=NoHub())
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-122B-A10B", "gpt2", "a/b", "a/b_c.d-e", "01-ai/Yi-34B"])
def test_ids_of_the_hub(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "a/b/c",
        "/a",
        "a/",
        "a//b",
        "../b",
        "a/..",
        "a/b..c",
        "a--b/c",
        "-a/b",
        "a/b-",
        "a b",
        "a/b.git",
        "a:b",
        "é/b",
    ],
)
def test_names_that_are_no_ids(name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(MoetuneError):
        resolve(name, hub=NoHub())


@given(st.text(max_size=60))
def test_any_name_resolves_or_is_our_error(name: str) -> None:
    class Empty:
        def cached(self, repo: str, filename: str) -> Path | None:
            del filename
            assert is_hub_id(repo)
            return None

        def fetch(self, repo: str, filename: str) -> Path | None:
            del filename
            assert is_hub_id(repo)
            return None

    message = ""
    try:
        resolve(name, hub=Empty())
    except MoetuneError as refused:
        message = f"{refused.message} {refused.hint}"
    assert printable(message, 10_000) == message
