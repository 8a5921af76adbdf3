"""The command of an arm: flags added, replaced and taken out, with their values; contradictions refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.caches import needs_preparing
from moetune.applications.experiments.command_line import ArmCommand, arm_command
from moetune.domain.errors import InputError
from moetune.domain.experiment_plan import Intervention, ServerPlan

BASE = ("python", "-m", "sglang.launch_server", "--model-path", "Q/M", "--tp", "4", "--port", "{port}")


def command(base: tuple[str, ...], *interventions: Intervention) -> tuple[str, ...]:
    return arm_command(ServerPlan("sglang", base), interventions).arguments


def change(*arguments: str, remove: tuple[str, ...] = (), name: str = "x", **fields: object) -> Intervention:
    return Intervention(name, arguments, remove, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "intervention", "expected"),
    [
        (("s", "--a", "1"), change("--b"), ("s", "--a", "1", "--b")),
        (("s", "--a", "1", "--c"), change("--a", "2"), ("s", "--a", "2", "--c")),
        (("s", "--a=1", "--c"), change("--a", "2"), ("s", "--a", "2", "--c")),
        (("s", "--a", "1", "--c"), change("--a=2"), ("s", "--a=2", "--c")),
        (("s", "--max_len", "1"), change("--max-len", "2"), ("s", "--max-len", "2")),
        (("s", "-tp", "4", "--c"), change("-tp", "8"), ("s", "-tp", "8", "--c")),
        (("s", "--a", "-1", "--c"), change("--a", "-2"), ("s", "--a", "-2", "--c")),
        (("s", "--bs", "1", "2", "--c"), change("--bs", "1", "2", "4"), ("s", "--bs", "1", "2", "4", "--c")),
        (("s", "--a", "1", "--c"), change(remove=("--a",)), ("s", "--c")),
        (("s", "--a=1", "--c"), change(remove=("--a",)), ("s", "--c")),
        (("s", "--bs", "1", "2", "--c"), change(remove=("--bs",)), ("s", "--c")),
        (("s", "--on", "model", "--c"), change(remove=("--on",)), ("s", "--c")),
        # Values that are named leave what stands behind them.
        (("s", "--tp", "4", "model"), change(remove=("--tp", "4")), ("s", "model")),
        (("s", "-e", "A=1", "-e", "B=2", "i"), change(remove=("-e", "A=1")), ("s", "-e", "B=2", "i")),
        (("s", "--a", "1", "--c"), change("--a", "1", "2", remove=("--a",)), ("s", "--c", "--a", "1", "2")),
        (("s", "serve", "m"), change(remove=("serve",)), ("s", "m")),
        (("s", "--", "--a", "1"), change("--a", "2"), ("s", "--", "--a", "1", "--a", "2")),
        (("s", '--j={"a": 1}'), change('--j={"a": 2}'), ("s", '--j={"a": 2}')),
    ],
)
def test_a_flag_is_added_replaced_or_taken_out_with_its_values(
    base: tuple[str, ...], intervention: Intervention, expected: tuple[str, ...]
) -> None:
    assert command(base, intervention) == expected


@pytest.mark.parametrize(
    ("base", "interventions", "says"),
    [
        (("s", "--a", "1"), [change(remove=("--b",))], "does not stand in it"),
        (("s", "--a", "1", "--a", "2"), [change(remove=("--a",))], "stands in it 2 times"),
        (("s", "--a", "1", "--a", "2"), [change("--a", "3")], "stands in the server's command 2 times"),
        (("s", "--tp", "4", "model"), [change("--tp", "8")], "what of it is to go is not clear"),
        (("s", "--on", "model"), [change("--on")], "what of it is to go is not clear"),
        (("s",), [change(remove=("serve",))], "stands in it 0 times"),
        (("bash", "-c", "serve --port 1"), [change("--a")], "is a text for bash"),
        (("/bin/sh", "-lc", "serve"), [change("--a")], "is a text for /bin/sh"),
        (("s",), [change("--a", "1"), change("--a", "2", name="y")], "both set `--a`, to different values"),
        (
            ("s", "--a", "0"),
            [change("--a", "1"), change(name="y", remove=("--a",))],
            "the other takes it out",
        ),
        (
            ("s", "--a", "0"),
            [change(remove=("--a",)), change("--a", "1", name="y")],
            "the other takes it out",
        ),
        (
            ("s",),
            [change(environment={"V": "1"}), change(name="y", environment={"V": "2"})],
            "both set the variable V",
        ),
    ],
)
def test_what_does_not_fit_or_contradicts_itself_is_an_error(
    base: tuple[str, ...], interventions: list[Intervention], says: str
) -> None:
    with pytest.raises(InputError) as error:
        command(base, *interventions)
    assert says in error.value.message
    assert '"x"' in error.value.message
    assert error.value.hint


def test_interventions_that_agree_are_on_together() -> None:
    both = (
        change("--a", "1", "--b", environment={"V": "1"}, remove=("--old",)),
        change("--a", "1", "--c", name="y", environment={"V": "1", "W": "2"}, remove=("--old",)),
    )
    made = arm_command(ServerPlan("sglang", ("s", "--old", "3"), environment={"V": "0", "U": "9"}), both)
    assert made.arguments == ("s", "--a", "1", "--b", "--c")
    assert made.environment == {"V": "1", "W": "2", "U": "9"}


def test_the_line_of_the_plan_and_no_secret_stand_in_the_message() -> None:
    with pytest.raises(InputError) as error:
        command(("s", "--api-key", "verysecret", "model"), change("--api-key", line=12))
    assert "(line 12)" in error.value.message
    assert "verysecret" not in error.value.message


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    plan = ServerPlan("sglang", (*BASE, "--x", '{"port": {"a": 1}}'), environment={"P": "{port}"})
    made = arm_command(plan, (), 30001, "/tmp/log")
    assert made.arguments[7:10] == ("--port", "30001", "--x")
    assert made.arguments[10] == '{"port": {"a": 1}}'
    assert made.environment == {"P": "30001"}
    assert arm_command(plan, ()).mentions("port")
    assert not made.mentions("port")


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=12)


@given(st.lists(WORDS, min_size=1, max_size=12))
def test_the_baseline_is_the_plans_own_command(words: list[str]) -> None:
    assert arm_command(ServerPlan("other", tuple(words)), ()).arguments == tuple(words)


FLAGS = st.lists(st.sampled_from(["--aa", "--bb", "--cc", "--dd"]), unique=True, max_size=4)
VALUES = st.lists(st.sampled_from(["1", "-1", "x y", "--", ""]).filter(lambda v: v != "--"), max_size=2)


@given(FLAGS, st.data())
def test_what_an_intervention_adds_can_be_taken_out_again(flags: list[str], data: st.DataObject) -> None:
    base = ("s", *(word for flag in flags for word in (flag, *data.draw(VALUES))))
    added = ("--new", *data.draw(VALUES))
    longer = command(base, change(*added))
    assert longer[: len(base)] == base
    assert command(longer, change(remove=("--new",))) == base


def test_case_46_an_arm_with_other_config_files_is_prepared_on_its_own(tmp_path: Path) -> None:
    """It runs the baseline's very command and compiles other kernels."""
    table = tmp_path / "E=8,N=64,device_name=X.json"
    table.write_text("{}")
    plan = ServerPlan("sglang", BASE)
    tuned = Intervention("tuned", configs=(str(table),))
    caches = tmp_path / "caches"
    baseline, arm = arm_command(plan, ()), arm_command(plan, [tuned])
    assert baseline.arguments == arm.arguments
    assert baseline.kernels == arm.kernels
    assert baseline.arm != arm.arm
    assert needs_preparing(baseline, caches)
    table.write_text('{"1": {}}')
    assert arm_command(plan, [tuned]).arm != arm.arm
    folder = Intervention("tuned", configs=(str(tmp_path),))
    assert arm_command(plan, [folder]).arm != baseline.arm
    assert arm_command(plan, [Intervention("none", without_configs=True)]).arm != baseline.arm


def test_case_46_a_port_makes_no_other_arm() -> None:
    plan = ServerPlan("sglang", BASE)
    assert (
        arm_command(plan, (), 30001).arm
        == arm_command(plan, (), 30002, "/x").arm
        == arm_command(plan, ()).arm
    )
    other = ServerPlan("sglang", (*BASE, "--flag"))
    assert arm_command(other, ()).kernels != arm_command(plan, ()).kernels
    assert isinstance(arm_command(plan, ()), ArmCommand)
