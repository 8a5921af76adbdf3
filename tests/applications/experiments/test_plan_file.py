"""A plan's file: what is read, and every fault of it at once with its line, its key and what was meant."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.applications.experiments import plan_lines
from moetune.applications.experiments.plan_fields import GENERATORS, SERVERS, fields_of
from moetune.applications.experiments.plan_file import PlanError, parse_plan, read_plan
from moetune.applications.experiments.plan_lines import MAX_BYTES, MAX_LINE, TomlFault, read_toml
from moetune.applications.experiments.plan_text import render_plan
from moetune.domain.errors import InputError
from moetune.domain.experiment import HIGHER_IS_BETTER, LoadResult
from moetune.domain.experiment_plan import (
    Budget,
    DecisionPlan,
    Intervention,
    LoadPlan,
    Plan,
    ServerPlan,
)

HERE = Path("/nowhere")
PLAN = """\
name = "evening"
seed = 7

[server]
name = "sglang"
command = ["python", "-m", "sglang.launch_server", "--model", "org/model", "--port", "{port}", "--tp", "4"]
environment = { OMP_NUM_THREADS = "1" }
version = "0.5.23"
host = "me@gpu-7.example"
gpus = [0, 1, 2, 3]
ready_s = 900

[load]
generator = "sglang.bench_serving"
requests = 100

[budget]
minutes = 300

[decision]
metric = "ttft_ms"

[[intervention]]
name = "sum in the kernel"
arguments = ["--enable-fused-moe-sum-all-reduce"]

[[intervention]]
name = "eight ranks"
arguments = ["--tp", "8"]
may_change = ["kv_tokens", "argument ep_size"]
"""


def parse(text: str, folder: Path = HERE) -> Plan:
    return parse_plan(text.encode(), "evening.toml", folder, "evening")


def faults(text: str, folder: Path = HERE) -> list[str]:
    with pytest.raises(PlanError) as error:
        parse(text, folder)
    assert isinstance(error.value, InputError)
    assert error.value.message.count("evening.toml: ") == min(len(error.value.faults), 21)
    return [str(fault) for fault in error.value.faults]


def with_line(after: str, *lines: str) -> str:
    assert after in PLAN
    return PLAN.replace(after, "\n".join((after, *lines)), 1)


# --- a plan that is right ----------------------------------------------------------------------------


def test_a_plan_is_read_into_its_values() -> None:
    plan = parse(PLAN)
    assert plan.name == "evening"
    assert plan.seed == 7
    assert plan.server.command[-2:] == ("--tp", "4")
    assert plan.server.gpus == (0, 1, 2, 3)
    assert plan.server.ready_s == 900.0
    assert plan.server.environment == {"OMP_NUM_THREADS": "1"}
    assert plan.load == LoadPlan("sglang.bench_serving", requests=100)
    assert plan.budget == Budget(minutes=300.0)
    assert plan.decision == DecisionPlan(metric="ttft_ms")
    assert [one.name for one in plan.interventions] == ["sum in the kernel", "eight ranks"]
    assert [one.line for one in plan.interventions] == [23, 27]
    assert plan.intervention("eight ranks").arguments == ("--tp", "8")


def test_a_plan_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "morning.toml"
    path.write_text(PLAN.replace('name = "evening"\n', "", 1))
    assert read_plan(path).name == "morning"


def test_paths_are_those_below_the_plans_own_directory(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "tuned").mkdir()
    path = tmp_path / "plans" / "evening.toml"
    text = PLAN.replace('host = "me@gpu-7.example"', 'folder = "run"\nconfig_root = "/srv"')
    path.write_text(text + '\n[[intervention]]\nname = "tuned"\nconfigs = ["../tuned"]\n')
    plan = read_plan(path)
    assert plan.interventions[-1].configs == (str(tmp_path / "tuned"),)
    assert plan.server.folder == str(tmp_path / "plans" / "run")
    assert plan.server.config_root == "/srv"


def test_a_folder_on_another_machine_stays_as_it_is() -> None:
    assert parse(with_line('name = "sglang"', 'folder = "run"')).server.folder == "run"


def test_every_field_of_the_dataclasses_is_a_key() -> None:
    """The keys are exactly the fields, but for what the reader fills in."""
    assert set(fields_of("server")) == set(ServerPlan.__dataclass_fields__)
    assert set(fields_of("load")) == set(LoadPlan.__dataclass_fields__)
    assert set(fields_of("budget")) == set(Budget.__dataclass_fields__)
    assert set(fields_of("decision")) == set(DecisionPlan.__dataclass_fields__)
    assert set(fields_of("intervention")) == set(Intervention.__dataclass_fields__) - {"line"}
    assert set(fields_of("")) == {"name", "seed"}


# --- faults ------------------------------------------------------------------------------------------


def test_all_faults_are_told_at_once_with_line_and_key() -> None:
    text = """\
sed = 3
name = "evening"
[server]
name = "sglan"
command = "python -m sglang.launch_server --port {port}"
host = "-oProxyCommand=x"
[load]
generator = "sglang.bench_serving"
requests = -4
concurency = 2
[budget]
minutes = inf
starts = -1
[[intervention]]
name = "baseline"
arguments = ["--x", "a\\u0000"]
[[intervention]]
name = "y"
arguments = [
  "--x",
  "{prt}",
]
configs = ["nowhere"]
"""
    found = faults(text)
    assert found == [
        "line 1: sed: is no key of a plan; did you mean seed?",
        'line 4: server.name: is "sglan"; did you mean "sglang"? It is one of "sglang", "vllm", "other"',
        "line 5: server.command: is one text, and has to be a list, since no shell reads it: write command = "
        '["python", "-m", "sglang.launch_server", "--port", "{port}"]',
        'line 6: server.host: is "-oProxyCommand=x", and has to be a host as ssh takes it, and none that '
        "begins with -",
        "line 9: load.requests: is -4, and has to be from 1 to 10000000",
        "line 10: load.concurency: is no key of [load]; did you mean concurrency?",
        "line 12: budget.minutes: is inf, which is no finite number",
        "line 13: budget.starts: is -1, and has to be from 0 to 10000",
        'line 15: intervention[1].name: "baseline" is the name of an arm of moetune\'s own',
        "line 16: intervention[1].arguments[2]: holds a control character or one that cannot be seen",
        "line 21: intervention[2].arguments[2]: {prt} stands for nothing; did you mean {port}? Here stand "
        "{port}, {log}, {cache}",
        'line 23: intervention[2].configs[1]: "nowhere" does not exist ("/nowhere/nowhere")',
    ]


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("[server]", "there is no table [server]: the command that starts the known-good server"),
        ("command = ", "server.command: is missing: the command that starts the known-good server"),
        ('generator = "sglang.bench_serving"\n', "load.generator: is missing"),
        ("[load]", "there is no table [load]"),
        ('name = "eight ranks"\n', "intervention.name: is missing"),
        ("[[intervention]]", "there is none: nothing to try"),
    ],
)
def test_what_a_plan_needs(gone: str, said: str) -> None:
    if gone == "[[intervention]]":
        text = PLAN[: PLAN.index(gone)]
    elif gone.startswith("["):
        rest = PLAN.partition(gone)[2]
        text = PLAN.partition(gone)[0] + rest[rest.index("\n[") + 1 :]
    elif gone == "command = ":
        text = "\n".join(line for line in PLAN.splitlines() if not line.startswith(gone))
    else:
        text = PLAN.replace(gone, "", 1)
    assert any(said in fault for fault in faults(text))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("minutes = 300", "minutes = -1", "is -1, and has to be from 0"),
        (
            "requests = 100",
            'arguments = ["--num-prompts", "9"]',
            "has --num-prompts, which load.requests sets",
        ),
        ("minutes = 300", "minutes = nan", "no finite number"),
        ("minutes = 300", "starts = 1", "an arm needs a start of the baseline and one of its own"),
        ("minutes = 300", "starts = 2.5", "is 2.5, and has to be a whole number"),
        ("minutes = 300", "starts = true", "is true, and has to be a whole number"),
        ("minutes = 300", "starts = 0x" + "f" * 5000, "too many digits"),
        ("minutes = 300", "minutes = 2026-12-02", "is 2026-12-02, and has to be a number"),
        ("requests = 100", 'requests = "100"', 'is "100", and has to be a whole number'),
        ("requests = 100", "concurrency = 300", "more than the 200 requests"),
        ("ready_s = 900", "ready_s = 0", "has to be over 0"),
        ("ready_s = 900", 'ready_path = "health"', "a path as in /health"),
        ("ready_s = 900", "port = 65536", "from 1 to 65535"),
        ("gpus = [0, 1, 2, 3]", "gpus = [0, 0]", "names a GPU twice"),
        ("gpus = [0, 1, 2, 3]", 'gpus = ["0"]', "has to be a whole number"),
        ("gpus = [0, 1, 2, 3]", "gpus = [-1]", "from 0"),
        ('version = "0.5.23"', 'version = "newest"', "a version as in 0.5.23"),
        ("OMP_NUM_THREADS", '"A B"', "not the name of an environment variable"),
        ('OMP_NUM_THREADS = "1"', "OMP_NUM_THREADS = 1", 'has to be a text: write "1"'),
        ('OMP_NUM_THREADS = "1"', "OMP = true", 'write "true"'),
        ('host = "me@gpu-7.example"', 'host = "a b"', "a host as ssh takes it"),
        ('host = "me@gpu-7.example"', 'host = "-Jevil"', "none that begins with -"),
        ("[budget]", "[buget]", "is no key of a plan; did you mean budget?"),
        ('metric = "ttft_ms"', 'metric = "tfft_ms"', 'did you mean "ttft_ms"?'),
        ('metric = "ttft_ms"', "smallest_effect = 0.01", "has to be over the margin of 0.01"),
        ('metric = "ttft_ms"', "alpha = 0.9", "over 0 and at most 0.5"),
        ('metric = "ttft_ms"', "margin = 0", "over 0 and at most 1"),
        ('metric = "ttft_ms"', "requests = 3", "it belongs to [load]"),
        ('may_change = ["kv_tokens", ', 'may_change = ["kv_token", ', '"kv_token" is no fact'),
        ('name = "eight ranks"', 'name = "All that helped"', "an arm of moetune's own"),
        ('name = "eight ranks"', 'name = "Sum in the kernel"', "also the name of the one in line 23"),
        ('name = "eight ranks"', 'name = "\\u001b[31mred"', "a control character"),
        ('name = "eight ranks"', 'name = "a\\u202eb"', "one that cannot be seen"),
        ('arguments = ["--tp", "8"]', 'arguments = ["--tp=4"]', "changes nothing of the server"),
        ('arguments = ["--tp", "8"]', 'environment = { OMP_NUM_THREADS = "1" }', "changes nothing"),
        ('arguments = ["--tp", "8"]', 'remove = ["--dp"]', "does not stand in it"),
        ('arguments = ["--tp", "8"]', 'arguments = "--tp 8"', 'write arguments = ["--tp", "8"]'),
        ('arguments = ["--tp", "8"]', "line = 3", "is no key of [intervention]"),
        (
            'arguments = ["--tp", "8"]',
            'arguments = ["--enable-fused-moe-sum-all-reduce"]',
            'does the same as "sum in the kernel" in line 23',
        ),
        (
            'arguments = ["--tp", "8"]',
            'configs = ["/"]\nwithout_configs = true',
            "takes the config files away",
        ),
        ('generator = "sglang.bench_serving"', 'generator = "wrk"', "It is one of"),
        ('generator = "sglang.bench_serving"', 'generator = "command"', "needs the arguments that start it"),
        ("requests = 100", 'result = { completed = "n" }', 'is for generator = "command"'),
        ("requests = 100", 'arguments = ["{ulr}"]', "{ulr} stands for nothing; did you mean {url}?"),
    ],
)
def test_a_fault_says_what_is_meant(before: str, after: str, said: str) -> None:
    assert before in PLAN
    text = PLAN.replace(before, after, 1)
    found = faults(text)
    assert any(said in fault for fault in found), found


def test_two_ways_to_write_one_arm_are_alike() -> None:
    text = PLAN + '\n[[intervention]]\nname = "again"\narguments = ["--tp=8"]\n'
    (found,) = faults(text)
    assert found == 'line 32: intervention[3]: does the same as "eight ranks" in line 27'


def test_a_fault_in_one_place_hides_none_in_another() -> None:
    text = PLAN.replace("requests = 100", "requests = 0").replace('["--tp", "8"]', '["--tp", "4"]')
    assert len(faults(text)) == 2


def test_the_result_of_a_command_has_to_be_mapped() -> None:
    load = '[load]\ngenerator = "command"\ncommand = ["bench", "--out", "{result}"]\n'
    text = PLAN.replace('[load]\ngenerator = "sglang.bench_serving"\n', load)
    assert any("needs a table [load.result]" in one for one in faults(text))
    mapped = text.replace(
        "[budget]",
        '[load.result]\ncompleted = "ok"\nduration_s = "t / 1000"\noutput_tokens = "n"\n'
        'ttft_ms = "ttft.p50 * 1000"\n'
        "[budget]",
    )
    assert parse(mapped).load.result["ttft_ms"] == "ttft.p50 * 1000"
    assert any(
        "does not say where ttft_ms stands" in one for one in faults(mapped.replace("ttft_ms =", "itl_ms ="))
    )
    assert any(
        "is nothing that is measured" in one for one in faults(mapped.replace("completed =", "complete ="))
    )
    assert any("dotted names" in one for one in faults(mapped.replace("t / 1000", "t/1000 + 3")))
    assert any("has no {result}" in one for one in faults(mapped.replace("{result}", "x")))


def test_json_in_an_argument_is_no_placeholder() -> None:
    text = PLAN.replace(
        '["--tp", "8"]', """['--cuda-graph-config', '{"prefill": {"backend": "full"}}', '{}', '{0}']"""
    )
    assert parse(text).interventions[1].arguments[1].startswith("{")


def test_a_message_that_would_never_end_is_cut() -> None:
    text = PLAN.replace("seed = 7", "\n".join(f"key{number} = 1" for number in range(200)))
    with pytest.raises(PlanError) as error:
        parse(text)
    assert len(error.value.faults) == 200
    assert error.value.message.endswith("and 180 more faults")


# --- files that are no plan --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"name = ", "line 1: is not TOML"),
        (b"a = 1\na = 2\n", "line 2: is not TOML"),
        (b"x = \xff\n", "line 1: is not UTF-8"),
        (b"a = " + b"[" * 3000 + b"]" * 3000, "nested deeper"),
        (b"a = " + b"[" * 20 + b"]" * 20, "nested deeper"),
        (b"x" * (MAX_BYTES + 1), "is larger than"),
        (b"a" + b".a" * MAX_LINE + b" = 1\n", "has a line of more than"),
        (b"a = " + b"9" * 5000 + b"\n", "is not TOML"),
        (b"a = '''\n\n", "is not TOML"),
        (b"", "there is no table [server]"),
    ],
)
def test_what_is_no_plan_is_an_error_with_its_line(data: bytes, said: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(data, "evening.toml", HERE)
    assert any(said in str(fault) for fault in error.value.faults)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    said = {
        tmp_path: "Is a directory",
        tmp_path / "missing": "No such file",
        fifo: "no regular file",
        Path("/dev/zero"): "no regular file",
        Path("a\0b"): "is no path",
    }
    for path, reason in said.items():
        with pytest.raises(PlanError, match=reason):
            read_plan(path)


def test_a_byte_order_mark_and_windows_lines_are_read() -> None:
    assert parse("\ufeff" + PLAN.replace("\n", "\r\n")) == parse(PLAN)


# --- lines -------------------------------------------------------------------------------------------


def test_every_kind_of_value_has_its_line() -> None:
    text = '''\
# a comment with = and [ and "
a = """one
two ""\\""" three"""
"b.c" = ['x', "y]",   # ] in a comment
  { k = 1, 'l m' = [1,
     2] },
]
d.e."f" = 2026-12-02 03:00:00
[g]
h = \'\'\'
[no.table]
\'\'\'
[[i.j]]
[[i.j]]
k = 1
[i.j.l]
m = true
'''
    lines = read_toml(text.encode()).lines
    assert lines[("a",)] == 2
    assert lines[("b.c", 0)] == 4
    assert lines[("b.c", 2, "l m", 1)] == 6
    assert lines[("d", "e", "f")] == 8
    assert lines[("g", "h")] == 10
    assert lines[("i", "j", 0)] == 13
    assert lines[("i", "j", 1, "k")] == 15
    assert lines[("i", "j", 1, "l", "m")] == 17


@pytest.mark.parametrize(
    "text", ["a ! 1\n", "a = [1 ; 2]\n", "a = {b = 1 ; c = 2}\n", "a = [1", "a = '", "[", "\\"]
)
def test_a_form_that_only_a_later_toml_has_costs_no_more_than_its_lines(text: str) -> None:
    """Should a reader take more than the scanner knows, the scanner ends, and knows what stood before."""
    assert plan_lines._Scanner("first = 1\n" + text).scan()[("first",)] == 1


NAMES = st.text("abc _-.é\"'\\\n", min_size=0, max_size=6)
LEAVES = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text("ab\"'\\\n#[]{}=,.", max_size=8), st.floats(allow_nan=False)
)


def toml(value: Any, draw: Any) -> str:
    """A value in one of the ways in which TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        ways = [quoted(value)]
        if "'" not in value and "\n" not in value:
            ways.append(f"'{value}'")
        if '"' not in value and "\\" not in value:
            ways.append(f'"""\n{value}"""')
        if "'" not in value:
            ways.append(f"'''\n{value}'''")
        way: str = draw(st.sampled_from(ways))
        return way
    gap: str = draw(st.sampled_from(["", " ", "\n  ", " # ]\n"]))
    if isinstance(value, list):
        return "[" + gap + f",{gap}".join(toml(item, draw) for item in value) + gap + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml(item, draw)}" for key, item in value.items()) + "}"
    return repr(value)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def places(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*at, key), *places(item, (*at, key)))]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_value_of_any_document_has_a_line_that_holds_it(data: st.DataObject) -> None:
    inner = st.recursive(
        LEAVES,
        lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(NAMES, deeper, max_size=3),
        max_leaves=6,
    )
    tables = data.draw(st.dictionaries(NAMES, st.dictionaries(NAMES, inner, max_size=3), max_size=3))
    text = ""
    for name, table in tables.items():
        header = "[[{}]]" if data.draw(st.booleans()) else "[{}]"
        text += header.format(quoted(name)) + "\n"
        for key, value in table.items():
            text += data.draw(st.sampled_from(["", "\n", "# x = 1\n", "  "]))
            text += f"{quoted(key)} = {toml(value, data.draw)}\n"
    document = read_toml(text.encode())
    rows = text.split("\n")
    for place in places(document.value):
        line = document.lines[place]
        last = place[-1]
        if isinstance(last, str):
            assert quoted(last) in rows[line - 1], (place, line)


# --- anything ----------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.one_of(
        st.integers(-(10**6), 10**6),
        st.booleans(),
        st.floats(),
        st.sampled_from(
            ["x", "", "-x", "{port}", "{x}", "baseline", "--tp", "a\0", "sglang", "command", "/", "\u202e"]
        ),
    ),
    lambda deeper: (
        st.lists(deeper, max_size=3) | st.dictionaries(st.sampled_from(["A", "b c", "completed"]), deeper)
    ),
    max_leaves=5,
)
TABLE_NAMES = ("server", "load", "budget", "decision", "intervention")


def dump(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\u{ord(c):04X}" if not c.isalnum() else c for c in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(dump, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dump(key)} = {dump(item)}" for key, item in value.items()) + "}"
    return repr(value)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A plan with some of its values replaced by anything."""
    lines = [f"{key} = {dump(draw(VALUES))}" for key in draw(st.sets(st.sampled_from(["name", "seed", "x"])))]
    for table in TABLE_NAMES:
        for _ in range(draw(st.integers(0, 3)) if table == "intervention" else 1):
            lines.append(f"[[{table}]]" if table == "intervention" else f"[{table}]")
            keys = draw(st.sets(st.sampled_from([*fields_of(table), "unknown"]), max_size=5))
            lines += [f"{key} = {dump(draw(VALUES))}" for key in sorted(keys)]
    return "\n".join(lines)


@settings(max_examples=150, deadline=None)
@given(st.one_of(documents().map(str.encode), st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_anything_is_a_plan_or_an_error(data: bytes) -> None:
    try:
        plan = parse_plan(data, "evening.toml", HERE)
    except PlanError as error:
        found = error
    else:
        assert isinstance(plan, Plan)
        return
    assert found.faults
    assert all(fault.message and fault.line >= 0 for fault in found.faults)
    assert found.message.replace("\n", " ").isprintable()


@given(st.text(max_size=400))
def test_any_text_is_a_document_or_a_fault(text: str) -> None:
    line = 0
    try:
        read_toml(text.encode("utf-8", "surrogatepass"))
    except TomlFault as fault:
        line = fault.line
    assert line <= text.count("\n") + 1


# --- written and read back ---------------------------------------------------------------------------

WORDS = st.text("abcdefg-_=/.{}'\"\\#é漢 ", min_size=1, max_size=12).filter(lambda text: "{" not in text)
ENVIRONMENTS = st.dictionaries(
    st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text("ab=\"' ", max_size=6), max_size=3
)
SECONDS = st.floats(0.5, 80_000).map(lambda value: round(value, 3))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    command = ("python", "-m", "server", "--model", draw(WORDS), "--port", "{port}", "{{", '{"a": 1}')
    server = ServerPlan(
        name=draw(st.sampled_from(SERVERS)),
        command=command,
        environment=draw(ENVIRONMENTS),
        version=draw(st.sampled_from(["", "0.5.23", "0.5.12.post1"])),
        port=draw(st.integers(1, 65_535)),
        ready_log=draw(st.sampled_from(["", "ready to roll!"])),
        ready_s=draw(SECONDS),
        stop=draw(st.sampled_from([(), ("docker", "stop", "x")])),
        gpus=tuple(sorted(draw(st.sets(st.integers(0, 7), max_size=4)))),
        tp=draw(st.integers(0, 8)),
    )
    load = LoadPlan(
        generator=draw(st.sampled_from([one for one in GENERATORS if one != "command"])),
        arguments=draw(st.sampled_from([(), ("--url", "{url}")])),
        requests=draw(st.integers(16, 900)),
        seed=draw(st.integers(0, 99)),
        limit_s=draw(SECONDS),
    )
    names = draw(st.lists(WORDS, min_size=1, max_size=4, unique_by=lambda name: name.strip().casefold()))
    interventions = tuple(
        Intervention(
            name=name,
            arguments=(f"--flag-{number}", draw(WORDS)),
            environment=draw(ENVIRONMENTS),
            without_configs=draw(st.booleans()),
            proof=draw(st.sampled_from(["", "active!"])),
            may_change=draw(st.sampled_from([(), ("kv_tokens", "other x")])),
        )
        for number, name in enumerate(names)
    )
    decision = DecisionPlan(
        metric=draw(st.sampled_from(list(HIGHER_IS_BETTER))), noise=draw(st.floats(0.001, 0.5))
    )
    return Plan(
        name=draw(WORDS),
        server=server,
        load=load,
        interventions=interventions,
        budget=Budget(draw(st.integers(2, 50)), draw(st.floats(0, 1000))),
        decision=decision,
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=80, deadline=None)
@given(plans(), st.lists(st.text("ab #\"'", max_size=20), max_size=3))
def test_a_plan_that_is_written_is_read_back(plan: Plan, notes: list[str]) -> None:
    first = f"intervention:{plan.interventions[0].name}"
    spoken = dict.fromkeys(("", "server", "server.command", first), notes)
    text = render_plan(plan, spoken, shown=("load.passes",))
    read = parse(text)
    numbered = replace(read, interventions=tuple(replace(one, line=0) for one in read.interventions))
    assert numbered == plan
    assert "passes = 1" in text
    assert render_plan(numbered, spoken, shown=("load.passes",)) == text


def test_fields_that_a_result_has_to_name_are_fields() -> None:
    assert {"completed", "duration_s", "output_tokens"} <= set(LoadResult.__dataclass_fields__)
