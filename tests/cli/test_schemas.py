"""The JSON Schemas that ship: every document obeys its own, and nothing stands in one unsaid."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource

from tests.cli.conftest import LANDSCAPE, MODEL, RTX, moetune

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

_SUFFIX = ".schema.json"
NAMES = tuple(
    sorted(
        file.name.removesuffix(_SUFFIX)
        for file in resources.files("moetune").joinpath("schemas").iterdir()
        if file.name.endswith(_SUFFIX)
    )
)


def load(name: str) -> dict[str, Any]:
    text = resources.files("moetune").joinpath("schemas").joinpath(f"{name}.schema.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def closed(schema: Any) -> Any:
    """The same schema, in which an object may hold nothing that is not described."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        result.setdefault("additionalProperties", False)
    return result


def validate(document: Any, name: str, *, strict: bool = True) -> None:
    contents = {other: closed(load(other)) if strict else load(other) for other in NAMES}
    registry: Registry[Any] = Registry().with_resources(
        [(content["$id"], Resource.from_contents(content)) for content in contents.values()]
    )
    Draft202012Validator(contents[name], registry=registry).validate(document)


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one(name: str) -> None:
    Draft202012Validator.check_schema(load(name))
    assert load(name)["$id"] == f"{name}.schema.json"


CASES = {
    "a pair": ("--tp", "4", "--server", "sglang", "--gpu", RTX),
    "one file": ("--tp", "4", "--server", "vllm", "--gpu", "NVIDIA H200"),
    "nearby files": ("--tp", "1", "--server", "sglang", "--gpu", "NVIDIA H200 NVL"),
    "block scales": ("--tp", "4", "--server", "sglang", "--gpu", "NVIDIA L40S", "--quant", "fp8-block"),
    "another vendor": ("--tp", "4", "--server", "sglang", "--gpu", "AMD Instinct MI300X"),
    "another runner": ("--tp", "4", "--server", "sglang", "--gpu", "NVIDIA B200", "--quant", "nvfp4"),
    "grouped": ("--tp", "4", "--server", "vllm", "--gpu", "NVIDIA L40S", "--quant", "moe_wna16"),
    "a default that cannot run": (
        *("--tp", "4", "--server", "sglang", "--server-version", "0.5.13"),
        *("--quant", "fp8", "--gpu", "NVIDIA L40S"),
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_plan_and_tune_obey_their_schemas(case: str, command: Callable[..., Result], tmp_path: Path) -> None:
    for verb in ("plan", "tune"):
        extra = ("--no-compile",) if verb == "tune" else ()
        result = command(verb, MODEL, *CASES[case], *extra, "--json")
        document = json.loads(result.out)
        assert document["schema"] == f"moetune.{verb}/1"
        assert document["gains"] is (result.code == 0)
        validate(document, verb)
    for path in tmp_path.rglob("*.provenance.json"):
        validate(json.loads(path.read_text()), "provenance")
    assert bool(document["written"]) is document["gains"]


def test_a_replay_obeys_its_schema(tmp_path: Path) -> None:
    result = moetune("replay", str(LANDSCAPE), "--measurements", "2", "--json", cwd=tmp_path)
    assert result.code == 0
    document = json.loads(result.out)
    validate(document, "replay")
    assert len(document["problems"]) == 12


def test_an_error_obeys_its_schema(command: Callable[..., Result]) -> None:
    result = command("plan", "no/such-model", "--offline", "--json")
    assert result.code == 2
    validate(json.loads(result.out), "error")


def test_a_document_that_breaks_its_schema_is_seen(command: Callable[..., Result]) -> None:
    document = json.loads(command("plan", MODEL, *CASES["a pair"], "--json").out)
    validate(document, "plan")
    document["gpus"][0]["predicted"]["entries"][0]["up_us"] = "fast"
    with pytest.raises(ValidationError):
        validate(document, "plan", strict=False)


def test_what_a_minor_version_adds_breaks_nothing(command: Callable[..., Result]) -> None:
    document = json.loads(command("plan", MODEL, *CASES["a pair"], "--json").out)
    document["gpus"][0]["new"] = 1
    validate(document, "plan", strict=False)
    with pytest.raises(ValidationError):
        validate(document, "plan")


def test_equal_commands_print_equal_bytes(command: Callable[..., Result]) -> None:
    first, second = (command("plan", MODEL, *CASES["a pair"], "--json").out for _ in range(2))
    assert first == second
