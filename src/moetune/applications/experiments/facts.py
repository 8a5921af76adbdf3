"""What a start of a server really ran: from its endpoints while it runs, and from its log.

Endpoints come first, for they give values and not texts; the log has the events that no endpoint tells
(which config file was read, which graphs were captured, what was refused) and stands in where an
endpoint does not answer. What differs from start to start by itself is left out, and so are secrets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from moetune.applications.doctor_facts import ALL_NEEDLES, LogReader
from moetune.applications.doctor_reader import HitReader
from moetune.applications.doctor_records import ServerFacts as LogServer
from moetune.applications.doctor_solve import Known, gpu_of
from moetune.applications.environment import SECRET_VALUE
from moetune.applications.experiments.endpoint import ask
from moetune.applications.experiments.log_texts import find_texts
from moetune.applications.experiments.redaction import is_secret_name
from moetune.domain.errors import InputError
from moetune.domain.experiment import ConfigRead, ServerFacts
from moetune.domain.text import printable
from moetune.servers.resolved_arguments import read_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

ARGUMENTS_FROM = "arguments from"
"""Key of `ServerFacts.other`: `endpoint` or `log`; nested values of the two are printed differently."""

_MAX_VALUE = 2048
_MAX_ARGUMENTS = 2048
_MAX_CONFIGS = 512
_OUTCOMES = {"found": "exact", "stale": "stale", "reused up": "reused up", "missing": "default"}
_FUSION_STATES = ("refused", "off", "on", "asked")
"""Where ranks say different things, the first of these counts."""

# Arguments that differ between two starts of one command: addresses, folders of this run, seeds,
# moments. `random_seed` is drawn when none is given (sglang wheels, `server_args.py`).
_OF_THE_START = frozenset(
    {
        *("host", "port", "grpc_port", "nccl_port", "metrics_http_port", "disaggregation_bootstrap_port"),
        *("dist_init_addr", "master_addr", "master_port", "data_parallel_rpc_port", "uds", "fds"),
        *("random_seed", "instance_id", "startup_time", "launch_command", "kv_events", "frontend"),
        *("crash_dump_folder", "log_requests_target", "file_storage_path", "torch_profiler_dir"),
        # Of the answer of /server_info, beside the arguments: facts of their own.
        *("internal_states", "version", "status", "max_total_num_tokens", "max_req_input_len"),
        *("tp_rank", "kv_event_sources", "remote_instance_transfer_engine_session_id"),
        "remote_instance_transfer_engine_weights_info_dict",
    }
)
_ADDRESS_OF_OBJECT = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")
_PRIVATE_FOLDER = re.compile(r"(?<=/tmp/)tmp[a-z0-9_]{8}\b")  # of Python's tempfile


@dataclass(slots=True)
class _Seen:
    """What was found, before it becomes facts; the endpoint's values win over the log's."""

    version: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    arguments_from: str = ""
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    other: dict[str, str] = field(default_factory=dict)


def read_facts(server: str, log: Path, url: str | None, looked_for: Sequence[str] = ()) -> ServerFacts:
    """What a start ran.

    Args:
        server: `sglang`, `vllm`, or `other`: then only `/v1/models` and the texts are looked at.
        log: of this start alone.
        url: `http://HOST:PORT` of the server while it runs; None: only the log is read.
        looked_for: texts that would prove something; those that stand in the log come back in `lines`.
    """
    seen = _Seen()
    if url is not None:
        _ENDPOINTS.get(server, _ask_models)(url, seen)
    read = _read_log(server, log, seen) if server in _ENDPOINTS else None
    lines = find_texts(log, looked_for)
    if read is None:
        return ServerFacts(server, seen.version, lines=lines, other=dict(sorted(seen.other.items())))
    return _facts(read, seen, lines, url)


def _facts(read: LogServer, seen: _Seen, lines: tuple[str, ...], url: str | None) -> ServerFacts:
    limits, graphs = read.limits, read.graphs
    if seen.arguments_from:
        seen.other[ARGUMENTS_FROM] = seen.arguments_from
    decode, prefill = graphs.get("decode"), graphs.get("prefill")
    start = read.start
    return ServerFacts(
        server=read.name,
        version=printable(seen.version or read.exact, 60),
        triton_version=_triton_version(read),
        gpus=_gpus(read),
        arguments=_kept(seen.arguments, url),
        runner=_runner(read, seen.arguments),
        configs=tuple(islice(_configs(read), _MAX_CONFIGS)),
        kv_tokens=_first(seen.kv_tokens, limits.get("kv_tokens"), limits.get("kv_allocated_tokens")),
        max_running_requests=_first(
            seen.max_running_requests,
            limits.get("max_running_requests"),
            start.number("max_running_requests", "max_num_seqs") if start is not None else None,
        ),
        prefill_chunk=_first(
            limits.get("prefill_chunk"),
            _number(seen.arguments.get("chunked_prefill_size")),
            _number(seen.arguments.get("max_num_batched_tokens")),
        ),
        decode_graphs=decode.sizes if decode is not None else (),
        prefill_graphs=prefill.sizes if prefill is not None else (),
        graphs_off=tuple(sorted((phase, printable(why, 300)) for phase, why in read.graphs_off.items())),
        all_reduce_fusion=_fusion(read.fusion),
        lines=lines,
        other={name: printable(value, _MAX_VALUE) for name, value in sorted(seen.other.items())},
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 13 else None


# --- the log ----------------------------------------------------------------------------------------


def _read_log(server: str, log: Path, seen: _Seen) -> LogServer:
    reader, arguments = LogReader(), dict[str, str]()
    name = str(log)
    try:
        for source, hit in HitReader(ALL_NEEDLES).read(name):
            if hit is None:
                reader.next_log(source)
                continue
            reader.take(hit)
            arguments.update(read_arguments(server, hit.line.text))
    except InputError as error:
        # An empty log, or none: what the endpoints say stands all the same.
        seen.other["log"] = printable(error.message.replace(name, "the log"), 300)
    if not seen.arguments and arguments:
        seen.arguments, seen.arguments_from = arguments, "log"
    record = reader.finish().servers.get(server)
    return record if record is not None else LogServer("vllm" if server == "vllm" else "sglang")


def _configs(read: LogServer) -> Iterator[ConfigRead]:
    if read.ignored:
        yield ConfigRead("up", "", "ignored", printable(read.ignored, 100))
    for shape in read.shapes.values():
        found = shape.name if shape.outcome == "found" else shape.found
        yield ConfigRead(
            kernel=shape.name.kernel,
            file=printable(shape.name.file, 300),
            outcome=_OUTCOMES[shape.outcome],
            path=printable(f"{found.directory}/{found.file}", 1400) if found is not None else "",
        )


def _triton_version(read: LogServer) -> str:
    """That of the directory which is looked in first: the running Triton's."""
    versions = {shape.places[0].triton for shape in read.shapes.values() if shape.places[0].triton}
    return ", ".join(sorted(versions))


def _gpus(read: LogServer) -> tuple[str, ...]:
    names = dict.fromkeys(shape.name.device for shape in read.shapes.values() if shape.name.device)
    return tuple(dict.fromkeys(printable(gpu_of(name, Known())[0].torch_name, 100) for name in names))


def _runner(read: LogServer, arguments: Mapping[str, str]) -> str:
    """The server's own words; else a lookup of a config file, which only the Triton kernel makes."""
    said = {printable(chosen.runner, 60).lower() for chosen in read.runners.values()}
    asked = arguments.get("moe_runner_backend") or arguments.get("moe_backend") or ""
    if asked.lower() not in ("", "auto", "none"):
        said.add(printable(asked, 60).lower())
    if not said and read.shapes:
        return "triton"
    return ", ".join(sorted(said))


def _fusion(states: Mapping[str, str]) -> tuple[str, str]:
    state = next((state for state in _FUSION_STATES if state in states), "")
    return (state, printable(states[state], 300)) if state else ("", "")


# --- endpoints --------------------------------------------------------------------------------------


def _ask_sglang(url: str, seen: _Seen) -> None:
    """`/server_info`; `/get_server_info` is its name in older releases, and an alias that warns later."""
    document: dict[str, Any] = {}
    for path in ("/server_info", "/get_server_info"):
        answer = ask(url, path)
        document = answer.json() if answer is not None else {}
        if document:
            break
    arguments = _printed(document)
    if not arguments:
        return
    seen.arguments, seen.arguments_from = arguments, "endpoint"
    seen.version = _text(document.get("version"))
    seen.kv_tokens = _whole(document.get("max_total_num_tokens"))
    states = document.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    seen.max_running_requests = _whole(state.get("effective_max_running_requests_per_dp"))
    _ask_models(url, seen)


def _ask_vllm(url: str, seen: _Seen) -> None:
    """`/version`, and of `/metrics` the one that has the size of the cache as labels."""
    answer = ask(url, "/version")
    seen.version = _text(answer.json().get("version")) if answer is not None else ""
    answer = ask(url, "/metrics")
    labels = _cache_labels(answer.text()) if answer is not None else {}
    seen.kv_tokens = _number(labels.get("kv_cache_size_tokens"))
    _ask_models(url, seen)


_CACHE = re.compile(r"^vllm:cache_config_info\{([^\n]{1,8192})\} ", re.M)
_LABEL = re.compile(r"(\w{1,64})=\"([^\"\\\n]{0,256})\"", re.A)


def _cache_labels(text: str) -> dict[str, str]:
    match = _CACHE.search(text)
    return dict(_LABEL.findall(match[1])) if match is not None else {}


def _ask_models(url: str, seen: _Seen) -> None:
    answer = ask(url, "/v1/models")
    models = answer.json().get("data") if answer is not None else None
    if not isinstance(models, list):
        return
    for model in models[:1]:
        if isinstance(model, dict):
            seen.other["model"] = printable(_text(model.get("id")), 300)
            length = _whole(model.get("max_model_len"))
            if length is not None:
                seen.other["max_model_len"] = str(length)


_ENDPOINTS: Mapping[str, Callable[[str, _Seen], None]] = {"sglang": _ask_sglang, "vllm": _ask_vllm}


def _printed(document: Mapping[str, Any]) -> dict[str, str]:
    """Values as a log prints them, so that an endpoint and a log can be compared where both are plain."""
    return {
        name: value if isinstance(value, str) else repr(value)
        for name, value in document.items()
        if name not in _OF_THE_START
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --- what is left out -------------------------------------------------------------------------------


def _kept(arguments: Mapping[str, str], url: str | None) -> dict[str, str]:
    """Arguments without those of this start alone and without secrets, sorted, cut, printable."""
    kept = {
        printable(name, 128): _settled(value, url)
        for name, value in sorted(arguments.items())
        if name not in _OF_THE_START and not is_secret_name(name) and not SECRET_VALUE.search(value)
    }
    return dict(islice(kept.items(), _MAX_ARGUMENTS))


def _settled(value: str, url: str | None) -> str:
    """A value without the port, the addresses of objects and the folders of this start."""
    value = _ADDRESS_OF_OBJECT.sub("0x…", value)
    value = _PRIVATE_FOLDER.sub("…", value)
    port = url.rpartition(":")[2].strip("/") if url is not None else ""
    if port.isdigit():
        value = re.sub(rf"(?<=:){port}\b", "{port}", value)
    return printable(value, _MAX_VALUE)
