"""What doctor says to excerpts from public threads (tests/logs/public/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetune.applications.doctor import Diagnosis, diagnose
from moetune.applications.doctor_solve import Known

PUBLIC = Path(__file__).parents[1] / "logs" / "public"


def read(name: str, *, model: str | None = None) -> Diagnosis:
    return diagnose([str(PUBLIC / f"{name}.log")], Known(model=model))


# Excerpt to server, version range, GPUs, codes, ranks of the worst finding.
ANSWERS = {
    "sglang-19003": ("sglang", "0.5.10", ("NVIDIA H200",), ["MOE021", "MOE022"], "TP2"),
    "sglang-21752": ("sglang", "0.5.10", ("NVIDIA B200",), ["MOE021", "MOE022"], "TP0"),
    "sglang-4028": ("sglang", "0.5.1", ("NVIDIA H20-3e",), ["MOE020"], None),
    "sglang-8513": ("sglang", "0.5.23", (), ["MOE003"], None),
    "ktransformers-2008": (
        "sglang",
        "0.5.10",
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        ["MOE020"],
        None,
    ),
    "vllm-17619": ("vllm", "0.33.0", ("NVIDIA H100 80GB HBM3",), ["MOE020"], "rank=1"),
    "vllm-17768": (
        "vllm",
        "0.33.0",
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA H200"),
        ["MOE020", "MOE020"],
        None,
    ),
    "vllm-28709": ("vllm", "0.12.0", ("AMD Instinct MI325X",), ["MOE020"], None),
    "vllm-32347": ("vllm", "0.33.0", ("Tesla T4",), ["MOE020"], "TP0"),
    "ragflow-11166": ("vllm", "0.12.0", ("NVIDIA RTX 5880 Ada Generation",), ["MOE020"], "TP0, TP1"),
    "qwen3-coder-461": ("vllm", "0.33.0", (), ["MOE013"], "rank=1"),
    "myoceane-vllm-gpt-oss": ("vllm", "0.19.0", (), ["MOE033"], None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_public_excerpts(name: str) -> None:
    server, version, gpus, codes, ranks = ANSWERS[name]
    diagnosis = read(name)
    (found,) = diagnosis.servers
    assert (found.server, found.version, found.gpus) == (server, version, gpus)
    assert [finding.code.code for finding in diagnosis.findings] == codes
    assert dict(diagnosis.findings[0].facts).get("ranks") == ranks


def test_every_excerpt_is_asked_about_and_linked() -> None:
    names = {path.stem for path in PUBLIC.glob("*.log")}
    assert names == {*ANSWERS, "sglang-5390"}
    readme = (PUBLIC / "README.md").read_text("utf-8")
    assert all(f"| {name}.log | https://" in readme for name in names)
    assert len(names) >= 10


def test_only_dense_gemms_behind_a_progress_bar() -> None:
    diagnosis = read("sglang-5390")
    assert not diagnosis.servers
    assert [finding.code.code for finding in diagnosis.findings] == ["MOE032"]


def test_the_model_that_the_thread_names_gives_the_command() -> None:
    """Each thread says elsewhere which model it was."""
    command = read("sglang-19003", model="Qwen/Qwen3-30B-A3B").findings[0].mend
    assert command.startswith("moetune tune Qwen/Qwen3-30B-A3B --tp 4 --server sglang")
    command = read("vllm-17619", model="Qwen/Qwen3-235B-A22B-FP8").findings[0].mend
    assert command.startswith("moetune tune Qwen/Qwen3-235B-A22B-FP8 --tp 8 --ep 2 --server vllm")
    command = read("sglang-4028", model="deepseek-ai/DeepSeek-R1").findings[0].mend
    assert "--tp 8" in command
    assert "--disable-shared-experts-fusion" in command  # E=256, not 257
    assert (
        read("vllm-28709", model="meta-llama/Llama-4-Maverick-17B-128E-Instruct")
        .findings[0]
        .mend.startswith("moetune plan")
    )


def test_paths_are_free_of_html() -> None:
    facts = dict(read("ragflow-11166").findings[0].facts)
    assert facts["looked in"].startswith("/home/user/.local/lib")


def test_a_name_that_was_cut_in_two_is_whole() -> None:
    facts = dict(read("ktransformers-2008").findings[0].facts)
    assert (
        facts["file"]
        == "E=384,N=14336,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition.json"
    )
