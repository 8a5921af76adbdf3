"""The record of an experiment: durable, resumable, of one plan, without secrets."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.record import (
    Finished,
    Record,
    config_digests,
    experiment_id,
    header_of,
    look,
    recorded,
)
from moetune.applications.experiments.redaction import (
    Redactor,
    is_secret_name,
    redacted_arguments,
    redacted_plan,
)
from moetune.applications.experiments.standing import experiments_there
from moetune.applications.journal import JournalBusyError
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError, OutputError
from moetune.domain.experiment import (
    ConfigRead,
    Ending,
    LoadResult,
    ScheduledStart,
    ServerFacts,
    StartResult,
)
from moetune.domain.experiment_plan import Intervention, LoadPlan, Plan, ServerPlan
from tests.applications.install_world import pair, write

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "hf_abcdefghijklmnopqrstuvwx"
PASSWORD = "correct horse battery"


def plan(**changes: Any) -> Plan:
    server = ServerPlan(
        "sglang",
        ("python", "-m", "sglang.launch_server", "--api-key", PASSWORD, "--port", "{port}"),
        {"HF_TOKEN": TOKEN, "NCCL_DEBUG": "WARN"},
    )
    made = Plan("evening", server, LoadPlan("guidellm"), (Intervention("a", ("--x", "1"), line=7),))
    return replace(made, **changes)


def facts() -> ServerFacts:
    return ServerFacts(
        "sglang",
        version="0.5.23",
        gpus=("NVIDIA H200",),
        arguments={"tp_size": "4", "api_key": PASSWORD},
        configs=(ConfigRead("up", "E=8.json", "exact", "/x/E=8.json"),),
        kv_tokens=412_160,
        decode_graphs=(1, 2),
        graphs_off=(("prefill", "because"),),
        all_reduce_fusion=("on", ""),
        other={"model": "m"},
    )


def finished(block: int = 0, position: int = 0, **more: Any) -> Finished:
    result = StartResult(
        ScheduledStart(block, position, "a"),
        Ending.DONE,
        (LoadResult(10, 10, 1.5, 100, 160, 106.6, 6.6, ttft_ms=12.5),),
        facts(),
        log="001-a.log",
    )
    return Finished(replace(result, **more))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def opened(state: Path, of: Plan | None = None) -> Record:
    return Record.open(state, of or plan(), {}, {})


def test_a_finished_start_is_read_again_as_it_was(state: Path) -> None:
    with opened(state) as record:
        record.add("begun", start=to_json(ScheduledStart(0, 0, "a")))
        assert record.facts.begun == ScheduledStart(0, 0, "a")
        record.add_start(replace(finished(), installed=("/root/configs/x.json",)))
    with opened(state) as record:
        assert record.facts.begun is None
        (start,) = record.facts.starts
        expected = facts()
        arguments = {**expected.arguments, "api_key": "(redacted)"}
        assert start.result.facts == replace(expected, arguments=arguments)
        assert replace(start.result, facts=None) == replace(finished().result, facts=None)
        assert start.installed == ("/root/configs/x.json",)


def test_every_cut_of_the_last_line_costs_that_start_only(state: Path) -> None:
    with opened(state) as record:
        record.add_start(finished(0, 0))
        record.add_start(finished(0, 1))
        path = record.folder / "journal.jsonl"
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(begin, len(whole), 97):
        path.write_bytes(whole[:cut])
        with opened(state) as record:
            assert [one.result.start.position for one in record.facts.starts] == [0]


def test_a_line_is_on_the_disk_before_add_returns(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with opened(state) as record:
        before = len(synced)
        record.add_start(finished())
        assert len(synced) == before + 1


def test_the_same_plan_has_the_same_record_and_another_one_has_another() -> None:
    same = plan(interventions=(Intervention("a", ("--x", "1"), line=99),))
    assert experiment_id(plan(), {}) == experiment_id(same, {})
    others = [
        experiment_id(plan(seed=2), {}),
        experiment_id(plan(interventions=(Intervention("a", ("--x", "2")),)), {}),
        experiment_id(plan(), {"/a.json": "0" * 64}),
        experiment_id(replace(plan(), load=LoadPlan("guidellm", seed=1)), {}),
    ]
    assert len({experiment_id(plan(), {}), *others}) == 5
    # A renewed token is no other experiment.
    server = replace(plan().server, environment={"HF_TOKEN": TOKEN + "new", "NCCL_DEBUG": "WARN"})
    assert experiment_id(plan(server=server), {}) == experiment_id(plan(), {})


def test_config_files_of_another_content_make_another_experiment(tmp_path: Path) -> None:
    folder = write(tmp_path / "configs", pair(64))
    first = config_digests([str(folder)])
    assert len(first) == 2
    write(folder, pair(128))
    assert config_digests([str(folder)]) != first


def test_two_processes_do_not_run_one_experiment(state: Path) -> None:
    with opened(state), pytest.raises(JournalBusyError, match="another moetune runs this experiment"):
        opened(state)
    with opened(state):
        pass


def test_no_secret_is_in_the_record(state: Path) -> None:
    with Record.open(state, plan(), {"OPENAI_API_KEY": "a-secret-of-this-process"}, {}) as record:
        record.add("stopped", reason=f"said {TOKEN} and {PASSWORD} and a-secret-of-this-process")
        result = finished().result
        record.add_start(Finished(replace(result, reason=f"--api-key={PASSWORD}")))
        text = (record.folder / "journal.jsonl").read_text()
    for secret in (TOKEN, PASSWORD, "a-secret-of-this-process"):
        assert secret not in text
    assert "NCCL_DEBUG" in text
    assert "WARN" in text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("--api-key", True),
        ("--api_key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("--max-total-tokens", False),
        ("--tokenizer-path", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("MONKEY", False),
    ],
)
def test_what_is_named_like_a_secret(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_arguments_without_their_secrets() -> None:
    given = (
        "serve",
        "--api-key",
        "x",
        "--max-total-tokens",
        "100",
        "--hf-token=abc",
        TOKEN,
        "--token",
        "--tp",
        "4",
    )
    shown = ("serve", "--api-key", "(redacted)", "--max-total-tokens", "100", "--hf-token=(redacted)")
    assert redacted_arguments(given) == (*shown, "(redacted)", "--token", "--tp", "4")


@given(st.text(min_size=6, max_size=30), st.text(max_size=40), st.text(max_size=40))
def test_a_secret_goes_wherever_it_stands(secret: str, before: str, after: str) -> None:
    redactor = Redactor((secret,))
    shown = redactor.value({"a": [f"{before}{secret}{after}", 1, None, {"b": secret}]})
    assert secret not in json.dumps(shown, ensure_ascii=False) or secret in "(redacted)"


JSON_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


@given(
    arguments=st.dictionaries(JSON_TEXT, JSON_TEXT, max_size=4),
    graphs=st.lists(st.tuples(JSON_TEXT, JSON_TEXT), max_size=3).map(tuple),
    number=st.none() | st.integers(0, 10**9),
    ms=st.none() | st.floats(0, 1e9),
)
def test_any_start_goes_through_json(
    arguments: dict[str, str], graphs: tuple[tuple[str, str], ...], number: int | None, ms: float | None
) -> None:
    seen = ServerFacts("vllm", arguments=arguments, graphs_off=graphs, kv_tokens=number)
    result = finished(facts=seen, passes=(LoadResult(1, 1, 1.0, 1, 1, 1.0, 1.0, itl_ms=ms),)).result
    assert from_json(StartResult, json.loads(json.dumps(to_json(result))), "test") == result


def test_a_full_disk_is_said_and_loses_nothing(state: Path) -> None:
    with opened(state) as record:
        record.add_start(finished(0, 0))
        size = (record.folder / "journal.jsonl").stat().st_size
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
            with pytest.raises(OutputError, match="cannot be written"):
                record.add_start(finished(0, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        record.add_start(finished(0, 2))
    with opened(state) as record:
        assert [one.result.start.position for one in record.facts.starts] == [0, 2]


BROKEN = (
    b'{"kind":"start"}\n',
    b'{"kind":"start","attempt":1,"preparing":false,"installed":[],"result":{}}\n',
    b'{"kind":"size","size":3}\n',
    b'{"kind":"combined","interventions":7,"left_out":[],"first_block":0}\n',
    b"no json\n",
)


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_an_error_and_status_goes_on(state: Path, line: bytes) -> None:
    with opened(state) as record:
        path, name = record.folder / "journal.jsonl", record.id
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(InputError, match="broken"):
        opened(state).__exit__()
    with pytest.raises(InputError):
        look(state, name)
    (one,) = experiments_there(state)
    assert (one.id, one.standing) == (name, "broken")


def test_unknown_lines_of_a_newer_release_are_passed_over(state: Path) -> None:
    with opened(state) as record:
        record.add("something new", value=1)
    with opened(state) as record:
        assert record.facts.starts == []


def test_looking_neither_locks_nor_changes(state: Path) -> None:
    with opened(state) as record:
        record.add("called", plan="/plans/evening.toml")
        record.add("begun", start=to_json(ScheduledStart(0, 0, "a")))
        before = (record.folder / "journal.jsonl").read_bytes()
        seen = look(state, record.id)
        assert seen.running
        assert seen.plan == replace(redacted_plan(plan()), interventions=(Intervention("a", ("--x", "1")),))
        assert (record.folder / "journal.jsonl").read_bytes() == before
        assert [one.standing for one in experiments_there(state)] == ["running"]
    (one,) = experiments_there(state)
    assert (one.standing, one.next) == ("half-way", "moetune experiment /plans/evening.toml")
    assert recorded(state) == (one.id,)


def test_a_plan_that_could_not_run_is_no_experiment_yet(state: Path) -> None:
    with opened(state) as record:
        record.add("called", plan="/plans/evening.toml")
    assert experiments_there(state) == ()


def test_what_is_next_for_one_that_is_over(state: Path) -> None:
    with opened(state) as record:
        record.add("kept", installs=["i0123456789ab"])
        record.add("done")
        name = record.id
    assert [(one.standing, one.next) for one in experiments_there(state)] == [
        ("done", f"moetune uninstall {name}")
    ]
    with Record.open_known(state, name) as record:
        record.add("taken back")
    assert [(one.standing, one.next) for one in experiments_there(state)] == [("taken back", "")]


@pytest.mark.parametrize("name", ["e" + "0" * 12, "../../etc", "e0", "", "e0123456789aé"])
def test_an_experiment_that_is_not_there(state: Path, name: str) -> None:
    with pytest.raises(InputError, match="no experiment"):
        look(state, name)


def test_nothing_of_another_user_is_trusted(state: Path) -> None:
    with opened(state) as record:
        name = record.id
    (state / "experiments").chmod(0o777)
    with pytest.raises(OutputError, match="can be written by others"):
        look(state, name)
    with pytest.raises(OutputError, match="can be written by others"):
        opened(state).__exit__()


def test_the_header_says_nothing_of_where_lines_stand() -> None:
    assert header_of(plan(), {})["plan"]["interventions"][0]["line"] == 0
    assert "HF_TOKEN" in json.dumps(header_of(plan(), {}))


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
