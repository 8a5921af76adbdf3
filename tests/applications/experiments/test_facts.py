"""What a start really ran: from its endpoints, from its log, and from neither."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments import endpoint
from moetune.applications.experiments.differences import differences
from moetune.applications.experiments.endpoint import ask
from moetune.applications.experiments.facts import ARGUMENTS_FROM, read_facts
from moetune.applications.experiments.log_texts import find_texts
from moetune.domain.codec import to_json
from moetune.servers.resolved_arguments import read_arguments
from tests.applications.experiments.recorded import (
    DOWN,
    FILE,
    RELEASES,
    SGLANG,
    config_folder,
    start,
    write_configs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIMITS = (
    "[2026-01-01 20:00:00 TP0] max_total_num_tokens=1000, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests=48, context_len=262144, available_gpu_mem=4.1 GB\n"
)


def log_of(folder: Path, text: str) -> Path:
    path = folder / "server.log"
    path.write_text(text)
    return path


# --- the four releases ------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_facts_of_each_release(release: str, tmp_path: Path) -> None:
    files = write_configs(release, tmp_path / "root")
    server, _, version = release.partition("-")
    with start(release, tmp_path / "run", configs=tmp_path / "root") as running:
        facts = running.facts(server, ("ready to roll", "startup complete", "never printed"))
    assert (facts.server, facts.version) == (server, version)
    assert [config.path for config in facts.configs] == files
    assert {config.outcome for config in facts.configs} == {"exact"}
    assert [config.kernel for config in facts.configs] == ["up", "down"][: len(files)]
    assert facts.runner == "triton"
    assert facts.gpus == ("NVIDIA RTX PRO 6000 Blackwell Server Edition",)
    assert facts.kv_tokens is not None
    assert facts.kv_tokens == pytest.approx(412160, rel=0.002)
    assert facts.max_running_requests == 48
    assert facts.prefill_chunk == 8192
    assert facts.decode_graphs == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)
    assert bool(facts.prefill_graphs) == (release in ("sglang-0.5.12", "sglang-0.5.23"))
    assert facts.triton_version == (
        config_folder(release, Path("x")).name.removeprefix("triton_").replace("_", ".")
        if server == "sglang"
        else ""
    )
    assert facts.arguments["tp_size" if server == "sglang" else "tensor_parallel_size"] == "4"
    assert facts.other[ARGUMENTS_FROM] == ("endpoint" if server == "sglang" else "log")
    assert facts.other["model"] == "Qwen/Qwen3.5-122B-A10B"
    assert facts.other["max_model_len"] == "262144"
    assert any("startup complete" in line for line in facts.lines)
    assert not any("never printed" in line for line in facts.lines)


@pytest.mark.parametrize("release", RELEASES)
def test_log_alone_gives_the_same_facts(release: str, tmp_path: Path) -> None:
    """Where an endpoint does not answer, nothing that is compared may look different."""
    server = release.partition("-")[0]
    with start(release, tmp_path) as running:
        asked = running.facts(server)
        read = running.facts(server, endpoint=False)
    assert read.arguments["max_seq_len" if server == "vllm" else "mem_fraction_static"]
    assert list(differences((asked,), (replace(read, other={**asked.other, **read.other}),))) == []


@pytest.mark.parametrize("release", RELEASES)
def test_two_starts_of_one_command_do_not_differ(release: str, tmp_path: Path) -> None:
    """Ports, seeds and a cache that is some pages larger are nothing in which arms differ."""
    server = release.partition("-")[0]
    found = []
    for _ in range(2):
        with start(release, tmp_path) as running:
            found.append(running.facts(server))
    assert found[0].kv_tokens != found[1].kv_tokens
    assert list(differences(found[:1], found[1:])) == []


@pytest.mark.parametrize("release", RELEASES)
def test_default_config_and_refused_fusion(release: str, tmp_path: Path) -> None:
    server = release.partition("-")[0]
    (tmp_path / "root" / "configs").mkdir(parents=True)
    faults = {"RECORDED_FAULT": "fusion-refused"}
    with start(release, tmp_path / "run", variables=faults, configs=tmp_path / "root") as running:
        facts = running.facts(server)
    assert {config.outcome for config in facts.configs} == {"default"}
    assert [config.file for config in facts.configs] == ([FILE, DOWN] if server == "sglang" else [FILE])
    state, reason = facts.all_reduce_fusion
    assert state == "refused"
    assert "orkspace" in reason or "preflight" in reason


@pytest.mark.parametrize("release", SGLANG)
def test_deterministic_mode_ignores_files(release: str, tmp_path: Path) -> None:
    write_configs(release, tmp_path / "root")
    flag = ["--enable-deterministic-inference"]
    with start(release, tmp_path / "run", flag, configs=tmp_path / "root") as running:
        facts = running.facts("sglang")
    assert [config.outcome for config in facts.configs] == ["ignored"]


# --- endpoints --------------------------------------------------------------------------------------


@contextmanager
def answering(
    answers: Mapping[str, tuple[int, bytes]], delay_s: float = 0
) -> Iterator[tuple[str, list[str]]]:
    """A web server with these answers; its url and the paths that were asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = answers.get(self.path, (404, b"{}"))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", body.decode())
            self.end_headers()
            try:
                for piece in [body[i : i + 64] for i in range(0, len(body), 64)] if delay_s else [body]:
                    time.sleep(delay_s)
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                return

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_endpoint_wins_over_the_log(tmp_path: Path) -> None:
    answer = {
        "tp_size": 8,
        "max_total_num_tokens": 5000,
        "internal_states": [{"effective_max_running_requests_per_dp": 26}],
        "version": "0.5.23",
    }
    log = log_of(tmp_path, f"server_args={{'tp_size': 4, 'x': 'y'}}\n{LIMITS}")
    with answering({"/server_info": (200, json.dumps(answer).encode())}) as (url, _):
        facts = read_facts("sglang", log, url)
    assert facts.arguments == {"tp_size": "8"}
    assert (facts.kv_tokens, facts.max_running_requests, facts.version) == (5000, 26, "0.5.23")
    facts = read_facts("sglang", log, None)
    assert facts.arguments == {"tp_size": "4", "x": "y"}
    assert (facts.kv_tokens, facts.max_running_requests, facts.version) == (1000, 48, "")


def test_old_name_of_the_endpoint(tmp_path: Path) -> None:
    log = log_of(tmp_path, LIMITS)
    with answering({"/get_server_info": (200, b'{"tp_size": 2}')}) as (url, asked):
        assert read_facts("sglang", log, url).arguments == {"tp_size": "2"}
    assert asked[:2] == ["/server_info", "/get_server_info"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, b'{"tp_size": 8}'),
        (200, b"not json"),
        (200, b"[1]"),
        (200, b'{"tp_size": NaN}'),
        (200, b"[" * 100_000),
        (401, b'{"error": "no key"}'),
        (200, b'{"internal_states": "x", "version": 5, "max_total_num_tokens": "y"}'),
    ],
)
def test_log_stands_in_for_a_bad_answer(answer: tuple[int, bytes], tmp_path: Path) -> None:
    log = log_of(tmp_path, f"server_args={{'tp_size': 4}}\n{LIMITS}")
    with answering({"/server_info": answer}) as (url, _):
        facts = read_facts("sglang", log, url)
    assert facts.arguments == {"tp_size": "4"}
    assert facts.kv_tokens == 1000


def test_redirects_are_not_followed() -> None:
    with answering({"/secret": (200, b"{}")}) as (target, reached):
        elsewhere = f"{target}/secret".encode()
        with answering({"/server_info": (302, elsewhere)}) as (url, _):
            answer = ask(url, "/server_info")
    assert answer is not None
    assert answer.status == 302
    assert answer.json() == {}
    assert reached == []


def test_proxies_of_the_machine_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering({}) as (proxy, reached), answering({"/version": (200, b'{"version": "1"}')}) as (url, _):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        answer = ask(url, "/version")
    assert answer is not None
    assert answer.json() == {"version": "1"}
    assert reached == []


def test_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, all of them do not."""
    monkeypatch.setattr(endpoint, "MAX_ANSWER_BYTES", 8 << 20)
    with answering({"/metrics": (200, b"x" * 64 * 100)}, delay_s=0.05) as (url, _):
        assert ask(url, "/metrics", limit_s=0.5) is None


def test_answer_that_is_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_ANSWER_BYTES", 1000)
    with answering({"/long": (200, b"x" * 1001), "/fits": (200, b"x" * 1000)}) as (url, _):
        assert ask(url, "/long") is None
        assert ask(url, "/fits") is not None


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "http://127.0.0.1:1", "http://", "http://[::1", "x"])
def test_what_cannot_be_asked_is_none(url: str) -> None:
    assert ask(url, "/health", limit_s=1) is None


def test_unknown_server_has_its_model_and_its_texts(tmp_path: Path) -> None:
    log = log_of(tmp_path, "INFO: using grouped_mm\nINFO: started\n")
    models = (200, b'{"data": [{"id": "/models/tiny"}]}')
    with answering({"/v1/models": models}) as (url, asked):
        facts = read_facts("other", log, url, ("grouped_mm", "batched_mm"))
    assert facts.lines == ("INFO: using grouped_mm",)
    assert facts.other == {"model": "/models/tiny"}
    assert facts.arguments == {}
    assert asked == ["/v1/models"]


# --- what is left out -------------------------------------------------------------------------------


def test_addresses_seeds_and_secrets_are_left_out(tmp_path: Path) -> None:
    planted = "sk-planted1234567890"
    log = log_of(
        tmp_path,
        f"server_args=ServerArgs(host='0.0.0.0', port=30007, nccl_port=12345, random_seed=7, "
        f"api_key='{planted}', admin_api_key='other-secret', hf='hf_planted12345678', "
        "url='http://user:password9@host/x', max_total_tokens=1000, tokenizer_path='tok', "
        "hook='http://127.0.0.1:30007/x', f=<function f at 0x7f001122aabb>, tmp='/tmp/tmpab12cd_x/y')\n"
        f"{LIMITS}",
    )
    facts = read_facts("sglang", log, "http://127.0.0.1:30007")
    assert facts.arguments == {
        "f": "<function f at 0x…>",
        "hook": "http://127.0.0.1:{port}/x",
        "max_total_tokens": "1000",
        "tmp": "/tmp/…/y",
        "tokenizer_path": "tok",
    }
    text = json.dumps(to_json(facts))
    for secret in (planted, "other-secret", "hf_planted", "password9"):
        assert secret not in text


def test_arguments_come_out_without_control_characters(tmp_path: Path) -> None:
    log = log_of(tmp_path, "server_args={'model_path': 'a\x07\u202eb\x9b2Jc', 'x\x07': 1, 'tp_size': 4}\n")
    facts = read_facts("sglang", log, None)
    text = json.dumps(to_json(facts), ensure_ascii=False)
    assert facts.arguments["tp_size"] == "4"
    assert not [c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"]
    answer = json.dumps({"model_path": "a\x07\u202eb", "x\x1b[2J": 1}).encode()
    with answering({"/server_info": (200, answer)}) as (url, _):
        text = json.dumps(to_json(read_facts("sglang", log, url)), ensure_ascii=False)
    assert not [c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"]


@pytest.mark.parametrize("release", RELEASES)
def test_hostile_log_never_comes_out_raw(release: str, tmp_path: Path) -> None:
    server = release.partition("-")[0]
    faults = {"RECORDED_FAULT": "hostile-log"}
    wanted = ("Using MoE kernel config from", "markup", "xxxxxxxx")
    with start(release, tmp_path, variables=faults) as running:
        facts = running.facts(server, wanted)
        alone = running.facts(server, wanted, endpoint=False)
    for found in (facts, alone):
        text = json.dumps(to_json(found), ensure_ascii=False)
        assert not [c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u200b"]
        assert len(text) < 60_000
        # The true lines after it are read all the same.
        assert found.max_running_requests == 48
    assert len(facts.lines) >= 2


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, bytes(range(256)) * 64, b"\x1f\x8bgarbage"])
def test_log_that_is_none_is_told(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(content)
    facts = read_facts("sglang", log, None)
    assert facts.kv_tokens is None
    assert facts.arguments == {}


def test_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    facts = read_facts("vllm", tmp_path / "none.log", None, ("x",))
    assert facts.lines == ()
    assert "cannot be read" in facts.other["log"]
    assert str(tmp_path) not in facts.other["log"]


# --- printed arguments ------------------------------------------------------------------------------

_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
_PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.text(max_size=20)
)
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(st.dictionaries(_NAMES, _VALUES, max_size=6), st.booleans())
def test_printed_arguments_come_back(values: dict[str, object], as_dictionary: bool) -> None:
    """Whatever stands inside a value: quotes, brackets, commas, names with an equals sign."""
    if as_dictionary:
        line = f"server_args={values!r} trailing"
    else:
        line = f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in values.items())}) x"
    expected = {
        name: repr(value)[1:-1] if isinstance(value, str) else repr(value) for name, value in values.items()
    }
    assert read_arguments("sglang", line) == expected


def test_printed_objects_are_one_value() -> None:
    line = (
        "[x] server_args=ServerArgs(a=CudaGraphConfig(decode=<Mode.FULL: 'full'>, bs=[1, 2]), "
        "b=<function f at 0x7f>, c='it\\'s, d=1', e={'k': (1, 2)})"
    )
    assert read_arguments("sglang", line) == {
        "a": "CudaGraphConfig(decode=<Mode.FULL: 'full'>, bs=[1, 2])",
        "b": "<function f at 0x7f>",
        "c": "it\\'s, d=1",
        "e": "{'k': (1, 2)}",
    }


@pytest.mark.parametrize(
    "text",
    ["server_args={", "server_args=ServerArgs(", "server_args=ServerArgs(a='", "server_args={'a': [[["],
)
def test_cut_off_arguments_do_no_harm(text: str) -> None:
    assert len(read_arguments("sglang", text)) <= 1


# --- texts ------------------------------------------------------------------------------------------


@given(
    pieces=st.lists(st.text(st.sampled_from("ab \n"), max_size=30), max_size=8),
    texts=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=5),
)
def test_a_text_is_found_when_the_log_holds_it(
    pieces: list[str], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = "".join(pieces)
    log = tmp_path_factory.mktemp("log") / "log"
    log.write_text(content)
    lines = find_texts(log, texts)
    for text in texts:
        assert any(text in line for line in lines) >= (text in content)
    assert all(line in content for line in lines)


@pytest.mark.parametrize("offset", [-40, -9, -1, 0, 1, 20])
@pytest.mark.parametrize("newline", ["\n", " "])
def test_a_text_across_two_chunks_is_found(offset: int, newline: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    filler = "x" * ((1 << 20) + offset - 1) + newline
    log.write_text(f"{filler}the proof stands here\n{filler}")
    (line,) = find_texts(log, ("the proof",))
    assert "the proof stands here" in line
    assert len(line) < 600
