"""lint says of config files what their server would do with them: cases 26 to 39, 53 and 55."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications import environment, lint, planning
from moetune.applications.lint_report import Linted, LintRequest
from moetune.domain.errors import InputError
from moetune.domain.finding_codes import all_codes
from moetune.domain.findings import Severity
from tests.applications.mutated_files import DOWN, ENTRY, GOOD, KEYS, UP, is_safe
from tests.doubles import ModelDouble
from tests.published_trees import config_text, unpack

if TYPE_CHECKING:
    from moetune.applications.environment import Installed
    from moetune.domain.findings import Finding
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lint, planning):
        monkeypatch.setattr(module, "find_installed", lambda _: None)


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both published trees, as two servers in one environment have them."""
    site = tmp_path_factory.mktemp("site")
    for package in ("sglang", "vllm"):
        unpack(package, site)
    return site


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def place(root: Path, directory: str = "triton_3_8_0") -> Path:
    return root / "configs" / directory


def run(*paths: Path, environ: dict[str, str] | None = None, **asked: Any) -> Linted:
    asked.setdefault("server", "sglang")
    return lint.lint(LintRequest(paths=paths, **asked), environ or {})


def of(linted: Linted, code: str) -> list[Finding]:
    return [found for found in linted.findings if found.code.code == code]


def codes(linted: Linted) -> set[str]:
    return {found.code.code for found in linted.findings}


def keys(found: Finding) -> list[str]:
    return dict(found.facts)["keys"].split()


def one(root: Path, table: Any, name: str = UP, **asked: Any) -> Linted:
    """Lint one file in the place where its server looks."""
    nested = asked.get("server", "sglang") == "sglang"
    folder = place(root) if nested else root
    return run(write(folder / name, table), **asked)


@pytest.fixture(scope="module")
def on_rtx(shipped: Path) -> Linted:
    return lint.lint(LintRequest(paths=(shipped,), gpu=RTX), {})


@pytest.fixture(scope="module")
def at_home(shipped: Path) -> Linted:
    return lint.lint(LintRequest(paths=(shipped,)), {})


class TestPublishedTrees:
    def test_all_files_are_looked_at_as_the_servers_they_belong_to(self, at_home: Linted) -> None:
        assert at_home.files == 728
        assert Counter({tally.server: 0 for tally in at_home.tallies}).keys() == {"sglang", "vllm"}
        by_server: Counter[str] = Counter()
        for tally in at_home.tallies:
            by_server[tally.server] += tally.files
        assert by_server == {"sglang": 390, "vllm": 338}
        assert any("--server sglang" in text for text in at_home.assumed)

    @pytest.mark.parametrize(
        ("server", "files", "entries", "bad_files", "bad"),
        [("sglang", 331, 5859, 173, 1101), ("vllm", 230, 4119, 116, 743)],
    )
    def test_what_cannot_run_on_sm_120(
        self, on_rtx: Linted, server: str, files: int, entries: int, bad_files: int, bad: int
    ) -> None:
        mine = [
            tally
            for tally in on_rtx.tallies
            if tally.server == server and tally.vendor == "NVIDIA" and tally.dtype in ("none", "fp8_w8a8")
        ]
        assert sum(tally.files for tally in mine) == files
        assert sum(tally.entries for tally in mine) == entries
        assert sum(tally.files_cannot_run for tally in mine) == bad_files
        assert sum(tally.entries_cannot_run for tally in mine) == bad

    def test_the_findings_name_those_very_entries(self, on_rtx: Linted) -> None:
        counted: Counter[str] = Counter()
        for found in of(on_rtx, "MOE111"):
            name = Path(found.where).name
            if "device_name=NVIDIA" in name and (",dtype=" not in name or ",dtype=fp8_w8a8" in name):
                counted["vllm" if "/vllm/" in found.where else "sglang"] += len(keys(found))
        assert counted == {"sglang": 1101, "vllm": 743}

    def test_other_dtypes_are_apart(self, on_rtx: Linted) -> None:
        dtypes = {tally.dtype for tally in on_rtx.tallies if tally.vendor == "NVIDIA"}
        assert {"none", "fp8_w8a8", "int8_w8a16", "int8_w8a8", "int4_w4a16", "bf16", "float8"} == dtypes

    def test_on_their_own_gpus_all_run(self, at_home: Linted) -> None:
        mine = [t for t in at_home.tallies if t.vendor == "NVIDIA" and t.dtype in ("none", "fp8_w8a8")]
        assert sum(tally.entries_cannot_run for tally in mine) == 0

    def test_case_28_the_shipped_file_with_wrong_numbers_is_named(self, at_home: Linted) -> None:
        (found,) = of(at_home, "MOE121")
        name = "E=512,N=256,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128, 128].json"
        assert found.where.endswith(f"configs/triton_3_5_1/{name}")
        assert keys(found) == ["64", "128", "256", "512"]

    def test_case_53_all_stale_files_are_one_finding(self, at_home: Linted) -> None:
        (found,) = of(at_home, "MOE142")
        facts = dict(found.facts)
        assert facts["files"] == "359"
        assert "3.8.0" in found.message
        assert found.mend.startswith("moetune borrow ")

    def test_case_37_files_that_can_never_be_matched(self, at_home: Linted) -> None:
        lost = {Path(found.where).name for found in of(at_home, "MOE131") if "/vllm/" in found.where}
        assert len(lost) == 9
        assert {name.partition("dtype=")[2].partition(".")[0].partition(",")[0] for name in lost} == {
            "int8_w8a8",
            "bf16",
            "float8",
        }

    def test_files_of_another_kernel_are_not_judged_by_this_one(self, at_home: Linted) -> None:
        others = of(at_home, "MOE153")
        assert len(others) == 8
        assert {found.where for found in others} & {found.where for found in of(at_home, "MOE103")} == set()

    def test_the_shipped_pairs_are_in_order(self, at_home: Linted) -> None:
        assert (
            codes(at_home) & {"MOE104", "MOE105", "MOE106", "MOE122", "MOE143", "MOE144", "MOE145"} == set()
        )


class TestOneFile:
    def test_a_good_file_has_nothing_to_say(self, tmp_path: Path) -> None:
        linted = one(tmp_path, GOOD)
        assert (linted.findings, linted.files, linted.entries) == ((), 1, len(KEYS))

    def test_case_26_what_fits_with_three_stages_and_not_with_four(self, tmp_path: Path) -> None:
        name = "E=8,N=512,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json"
        entry = ENTRY | {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_warps": 8}
        linted = one(tmp_path, GOOD | {"64": entry | {"num_stages": 4}, "128": entry}, name)
        (found,) = of(linted, "MOE111")
        assert keys(found) == ["64"]
        assert "147,456" in found.message
        assert f"--gpu 'NVIDIA GeForce RTX 4090'" in found.mend  # noqa: F541

    def test_case_27_the_right_answer_depends_on_the_server(self, tmp_path: Path) -> None:
        text = config_text("vllm", "E=128,N=768,device_name=NVIDIA_B200,", "block_shape")
        of_vllm = "E=128,N=768,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json"
        linted = one(tmp_path, text, of_vllm, server="vllm", gpu=RTX)
        assert linted.entries == 18
        assert linted.findings == ()
        document = {key: entry for key, entry in json.loads(text).items() if key != "triton_version"}
        linted = one(tmp_path, document, of_vllm.replace("[128,128]", "[128, 128]"), gpu=RTX)
        (wrong,), (over,) = of(linted, "MOE121"), of(linted, "MOE111")
        assert keys(wrong) == [key for key, entry in document.items() if entry["BLOCK_SIZE_K"] == 256]
        assert len(keys(wrong)) == 8
        assert sorted(map(int, keys(over))) == [32, 48, 64, 96, 2048, 3072, 4096]

    @pytest.mark.parametrize(
        ("server", "table", "code", "word"),
        [
            ("sglang", GOOD | {"triton_version": "3.8.0"}, "MOE102", "triton_version"),
            ("vllm", GOOD | {"triton_version": "3.8.0"}, None, ""),
            ("sglang", GOOD | {"8": ENTRY | {"waves_per_eu": 2}}, "MOE103", "waves_per_eu"),
            ("vllm", GOOD | {"8": ENTRY | {"kpack": 2}}, "MOE103", "kpack"),
            ("sglang", GOOD | {"8": ENTRY | {"grf_mode": "256"}}, "MOE103", "grf_mode"),
            ("sglang", GOOD | {"8": ENTRY | {"SPLIT_K": 1}}, "MOE103", "SPLIT_K"),
            ("vllm", GOOD | {"8": ENTRY | {"SPLIT_K": 1}}, None, ""),
            ("vllm", GOOD | {"8": ENTRY | {"USE_TMA": True}}, "MOE103", "USE_TMA"),
            ("sglang", GOOD | {"8": ENTRY | {"num_warps": "4"}}, "MOE103", "num_warps"),
            ("sglang", GOOD | {"8": ENTRY | {"BLOCK_SIZE_N": 96}}, "MOE103", "no power of two"),
            ("sglang", GOOD | {"8": [1]}, "MOE103", "object"),
            ("sglang", GOOD | {"8": {"BLOCK_SIZE_M": 16}}, "MOE103", "lacks"),
            ("sglang", GOOD | {"8": ENTRY | {"enable_fp_fusion": False}}, "MOE154", "enable_fp_fusion"),
        ],
    )
    def test_case_29_keys_that_the_server_dies_of(
        self, tmp_path: Path, server: str, table: Any, code: str | None, word: str
    ) -> None:
        linted = one(tmp_path, table, server=server)
        assert codes(linted) == ({code} if code else set())
        for found in linted.findings:
            assert word in found.message
            assert keys(found) == (["triton_version"] if code == "MOE102" else ["8"])

    def test_case_29_the_grouped_kernel_of_vllm_needs_split_k(self, tmp_path: Path) -> None:
        name = "E=8,N=512,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
        (found,) = of(one(tmp_path, GOOD, name, server="vllm"), "MOE103")
        assert "SPLIT_K" in found.message
        assert len(keys(found)) == len(KEYS)
        fixed = {key: entry | {"SPLIT_K": 1} for key, entry in GOOD.items()}
        assert of(one(tmp_path, fixed, name, server="vllm"), "MOE103") == []

    def test_a_k_that_a_name_does_not_say_is_not_taken_for_a_short_one(self, tmp_path: Path) -> None:
        name = "E=8,N=512,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
        large = ENTRY | {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "num_stages": 6}
        (found,) = of(one(tmp_path, dict.fromkeys(KEYS, large), name), "MOE111")
        assert "shared memory" in found.message

    def test_every_bad_entry_is_named_not_only_the_first(self, tmp_path: Path) -> None:
        bad = GOOD | {"2": {}, "8": ENTRY | {"kpack": 1}, "64": ENTRY | {"kpack": 2}}
        found = {tuple(keys(one)) for one in of(one(tmp_path, bad), "MOE103")}
        assert found == {("2",), ("8", "64")}

    def test_case_30_and_31_coverage(self, tmp_path: Path) -> None:
        (found,) = of(one(tmp_path, dict.fromkeys(("96", "128", "256", "512", "1024"), ENTRY)), "MOE141")
        assert dict(found.facts)["uncovered"] == "1-47 2049-8192"
        (found,) = of(one(tmp_path, dict.fromkeys(KEYS[:7], ENTRY)), "MOE141")
        assert dict(found.facts)["uncovered"] == "129-8192"
        assert of(one(tmp_path, dict.fromkeys(KEYS[:7], ENTRY), max_m=128), "MOE141") == []

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ('{"8": %s, "8": %s}', "MOE135"),
            ('{"8": %s, "08": %s}', "MOE135"),
            ('{"8.0": %s}', "MOE102"),
            ('{"default": %s}', "MOE102"),
            ("{}", "MOE134"),
            ('{"triton_version": "3.6.0"}', "MOE102"),
            ("[]", "MOE101"),
            ("null", "MOE101"),
            ('"8"', "MOE101"),
            ("", "MOE101"),
            ("{", "MOE101"),
            ('{"8": %s,}', "MOE101"),
            ("\ufeff{}", "MOE101"),
            ('{"8": {"BLOCK_SIZE_M": NaN}}', "MOE108"),
            ('{"8": {"BLOCK_SIZE_M": 1e999}}', "MOE108"),
            ("[" * 100_000, "MOE101"),
            ('{"8":' * 500 + "1" + "}" * 500, "MOE108"),
            ('{"8": %s' + "9" * 5000 + "}", "MOE101"),
            ('{"' + "1" * 5000 + '": %s}', "MOE102"),
            ('{"\\ud800": %s}', "MOE108"),
            ('{"8": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_M": 32}}', "MOE135"),
        ],
    )
    def test_case_38_hand_written_json(self, tmp_path: Path, text: str, code: str) -> None:
        linted = one(tmp_path, text.replace("%s", json.dumps(ENTRY)))
        assert code in codes(linted)

    def test_case_38_a_megabyte_of_entries_is_not_gone_through(self, tmp_path: Path) -> None:
        text = "{" + ",".join(f'"{"0" * (n % 12)}{n % 40_000}": 1' for n in range(60_000)) + "}"
        (found,) = one(tmp_path, text).findings
        assert (found.code.code, "entries" in found.message) == ("MOE108", True)

    def test_case_38_tabs_and_blanks_are_no_fault(self, tmp_path: Path) -> None:
        assert one(tmp_path, "\t" + json.dumps(GOOD, indent="\t") + "\r\n").findings == ()

    def test_case_38_fifty_megabytes_are_not_read(self, tmp_path: Path) -> None:
        path = write(place(tmp_path) / UP, "{}")
        os.truncate(path, 50 << 20)
        (found,) = run(path).findings
        assert found.code.code == "MOE108"
        assert "52,428,800" in found.message

    def test_an_fp8_file_for_a_gpu_without_fp8(self, tmp_path: Path) -> None:
        name = "E=8,N=512,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8.json"
        (found,) = one(tmp_path, GOOD, name).findings
        assert (found.code.code, len(keys(found))) == ("MOE113", len(KEYS))

    def test_an_unknown_gpu_is_said_and_the_rest_is_judged(self, tmp_path: Path) -> None:
        name = "E=8,N=512,device_name=NVIDIA_Foo_9000.json"
        assert codes(one(tmp_path, GOOD | {"x": ENTRY}, name)) == {"MOE151", "MOE102"}
        entry = ENTRY | {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_M": 128, "num_stages": 5}
        linted = one(tmp_path, GOOD | {"8": entry}, name, compute_capability="12.0")
        assert codes(linted) == {"MOE111"}

    def test_far_from_the_prediction(self, tmp_path: Path) -> None:
        def time_us(kernel: Kernel, m: int, launch: Launch) -> float:
            del kernel, m
            return 9.0 if launch.config.block_size_k == 128 else 5.0

        table = GOOD | {"64": ENTRY | {"BLOCK_SIZE_K": 128}}
        path = write(place(tmp_path) / UP, table)
        asked = LintRequest(paths=(path,), server="sglang", hidden=2048, topk=8)
        (found,) = lint.lint(asked, {}, ModelDouble(time_us)).findings
        assert (found.code.code, keys(found), found.cost) == ("MOE146", ["64"], "predicted, not measured")
        assert "1.80" in found.message
        assert run(path).findings == ()


class TestNames:
    @pytest.mark.parametrize(
        ("server", "name", "reason"),
        [
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200,dtype=int8_w8a8.json", "int8_w8a8"),
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200,dtype=bf16.json", "bf16"),
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200,dtype=float8.json", "float8"),
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200,block_shape=[128, 128].json", "without a space"),
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200_down.json", "_down"),
            ("vllm", "E=8,N=64,device_name=NVIDIA_H200_NVL.json", "NVIDIA_H200"),
            (
                "sglang",
                "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
                "[128, 128]",
            ),
            ("sglang", "E=8,N=64,device_name=NVIDIA_H200,dtype=float8.json", "float8"),
            ("sglang", "E=8,N=64,device_name=H200.json", "NVIDIA_H200"),
            ("sglang", "E=8,N=64,device_name=,dtype=fp8_w8a8.json", "names none"),
            ("sglang", "E=08,N=64,device_name=NVIDIA_H200.json", "form"),
            ("sglang", "E=8,N=64,device_name=NVIDIA H200.json", "NVIDIA_H200"),
        ],
    )
    def test_case_37_and_22_names_that_are_never_looked_for(
        self, tmp_path: Path, server: str, name: str, reason: str
    ) -> None:
        (found,) = of(one(tmp_path, GOOD, name, server=server), "MOE131")
        assert reason in found.message

    @pytest.mark.parametrize("version", ["0.5.4", "0.5.3"])
    def test_a_down_file_before_there_were_any(self, tmp_path: Path, version: str) -> None:
        linted = one(tmp_path, GOOD, DOWN, server_version=version, triton_version="3.8.0")
        assert "MOE131" in codes(linted)

    @pytest.mark.parametrize(
        "name", [UP, "E=8,N=64,device_name=Orin_(nvgpu).json", "E=8,N=64,device_name=NVIDIA_H200_NVL.json"]
    )
    def test_case_39_and_22_names_that_sglang_looks_for(self, tmp_path: Path, name: str) -> None:
        assert "MOE131" not in codes(one(tmp_path, GOOD, name))


class TestPlaces:
    def test_case_37_a_file_in_the_wrong_place(self, tmp_path: Path) -> None:
        (found,) = run(write(tmp_path / UP, GOOD)).findings
        assert found.code.code == "MOE132"
        assert "configs/triton_3_8_0" in found.message
        assert "SGLANG_MOE_CONFIG_DIR" in found.message
        assert run(write(tmp_path / "flat" / UP, GOOD), server="vllm").findings == ()

    def test_case_55_a_backup_directory(self, tmp_path: Path) -> None:
        write(place(tmp_path) / UP, GOOD)
        write(place(tmp_path, "triton_3_6_0_bak") / "notes.txt", "")
        (found,) = run(tmp_path).findings
        assert (found.code.code, found.code.severity) == ("MOE104", Severity.CRASH)
        assert found.where.endswith("configs/triton_3_6_0_bak")
        assert found.mend.startswith("mv ")
        assert run(tmp_path, server_version="0.5.11", triton_version="3.8.0").findings == ()

    def test_case_36_where_a_release_falls_back_to(self, tmp_path: Path) -> None:
        for directory in ("triton_3_1_0", "triton_3_3_1", "triton_3_5_1"):
            write(place(tmp_path, directory) / UP, GOOD)
        new = run(tmp_path, server_version="0.5.12", triton_version="3.6.0")
        assert codes(new) == {"MOE142"}
        assert "1 from triton_3_5_1" in of(new, "MOE142")[0].message
        for version in ("0.5.4", "0.5.11"):
            old = run(tmp_path, server_version=version, triton_version="3.6.0")
            assert codes(old) == {"MOE142", "MOE132"}
            assert "1 from triton_3_3_1" in of(old, "MOE142")[0].message
            assert of(old, "MOE132")[0].where.endswith("configs/triton_3_5_1")

    def test_case_33_a_pair_from_two_triton_versions(self, tmp_path: Path) -> None:
        write(place(tmp_path, "triton_3_7_1") / UP, GOOD)
        write(place(tmp_path, "triton_3_5_1") / DOWN, GOOD)
        (found,) = of(run(tmp_path), "MOE143")
        assert dict(found.facts) == {"up": "triton_3_7_1", "down": "triton_3_5_1"}
        write(place(tmp_path, "triton_3_7_1") / DOWN, GOOD)
        assert of(run(tmp_path), "MOE143") == []

    @pytest.mark.parametrize(
        ("version", "code"),
        [("0.5.5", "MOE106"), ("0.5.12", "MOE106"), ("0.5.13", "MOE144"), ("0.5.23", "MOE144")],
    )
    def test_case_32_a_pair_that_disagrees(self, tmp_path: Path, version: str, code: str) -> None:
        write(place(tmp_path) / UP, GOOD | {"64": ENTRY | {"BLOCK_SIZE_M": 64}})
        down = write(place(tmp_path) / DOWN, GOOD)
        for asked in (tmp_path, down):
            linted = run(asked, server_version=version, triton_version="3.8.0")
            (found,) = of(linted, code)
            assert found.where.endswith(DOWN)
            assert "64" in keys(found)
            assert codes(linted) == {code}

    def test_an_overridden_entry_may_no_longer_fit(self, tmp_path: Path) -> None:
        wide = ENTRY | {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_stages": 2}
        pair = {False: GOOD | {"64": ENTRY | {"BLOCK_SIZE_M": 256}}, True: GOOD | {"64": wide}}
        for is_down, table in pair.items():
            write(place(tmp_path) / (DOWN if is_down else UP), table)
        linted = run(tmp_path, gpu=RTX)
        (found,) = of(linted, "MOE111")
        assert found.where.endswith(DOWN)
        assert keys(found) == ["64"]
        (place(tmp_path) / UP).unlink()
        assert of(run(tmp_path, gpu=RTX), "MOE111") == []

    def test_case_34_use_tma_without_a_down_file(self, tmp_path: Path) -> None:
        write(place(tmp_path) / UP, GOOD | {"64": ENTRY | {"USE_TMA": True}})
        (found,) = run(tmp_path).findings
        assert (found.code.code, keys(found)) == ("MOE145", ["64"])
        old = run(tmp_path, server_version="0.5.16", triton_version="3.8.0")
        assert [(found.code.code, keys(found)) for found in old.findings] == [("MOE103", ["64"])]
        write(place(tmp_path) / DOWN, GOOD)
        assert run(tmp_path).findings == ()

    def test_use_tma_with_scales_by_row_computes_wrong_numbers(self, tmp_path: Path) -> None:
        for tags, expected in {
            ",dtype=fp8_w8a8,per_channel_quant=True": ["MOE122"],
            ",dtype=fp8_w8a8": ["MOE122"],
            ",dtype=fp8_w8a8,block_shape=[128, 128]": [],
            "": [],
        }.items():
            folder = tmp_path / (tags or "none")
            for name, more in {UP: {}, DOWN: {"USE_TMA": True}}.items():
                tagged = name.replace("H200", "H200" + tags)
                write(place(folder) / tagged, GOOD | {"64": ENTRY | more})
            linted = run(folder)
            assert [found.code.code for found in linted.findings] == expected, tags
            assert [keys(found) for found in linted.findings] == [["64"]] * len(expected)
            assert sum(tally.entries_wrong_numbers for tally in linted.tallies) == len(expected)

    def test_links_are_followed_and_circles_are_not(self, tmp_path: Path) -> None:
        data = write(tmp_path / "..data" / UP, GOOD)
        place(tmp_path).mkdir(parents=True)
        (place(tmp_path) / UP).symlink_to(data)
        (tmp_path / "configs" / "again").symlink_to(tmp_path)
        (tmp_path / "configs" / "E=1,N=1,device_name=X.json").symlink_to(
            tmp_path / "configs" / "E=1,N=1,device_name=X.json"
        )
        linted = run(tmp_path)
        assert linted.files == 1
        assert codes(linted) <= {"MOE107", "MOE136"}
        assert codes(linted)

    def test_what_is_no_file_is_not_waited_for(self, tmp_path: Path) -> None:
        place(tmp_path).mkdir(parents=True)
        os.mkfifo(place(tmp_path) / UP)
        (found,) = run(tmp_path).findings
        assert found.code.code == "MOE108"
        (place(tmp_path) / DOWN).mkdir()
        assert codes(run(tmp_path)) == {"MOE107", "MOE108"}

    def test_directories_and_files_without_rights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(place(tmp_path) / UP, GOOD)
        write(tmp_path / "closed" / UP, GOOD)
        scandir, opened = os.scandir, os.open

        def refuse_folder(path: Any) -> Any:
            if str(path).endswith("closed"):
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        def refuse_file(path: Any, *rest: Any) -> int:
            if str(path).endswith(UP):
                raise PermissionError(13, "Permission denied")
            return opened(path, *rest)

        monkeypatch.setattr(os, "scandir", refuse_folder)
        monkeypatch.setattr(os, "open", refuse_file)
        linted = run(tmp_path)
        assert codes(linted) == {"MOE107", "MOE136"}
        assert all("Permission denied" in found.message for found in linted.findings)

    def test_a_file_that_grows_while_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(place(tmp_path) / UP, GOOD)
        monkeypatch.setattr(os, "read", lambda *_: b" " * (1 << 16))
        (found,) = run(path).findings
        assert found.code.code == "MOE108"

    @pytest.mark.parametrize("what", ["missing", "empty"])
    def test_nothing_to_look_at_is_an_error(self, tmp_path: Path, what: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError):
            run(tmp_path / what)
        with pytest.raises(InputError):
            run()

    def test_json_of_other_things_is_left_alone(self, tmp_path: Path) -> None:
        write(tmp_path / "package.json", "[")
        write(place(tmp_path) / UP, GOOD)
        write(place(tmp_path) / f"{UP}.provenance.json", "[")
        assert run(tmp_path).findings == ()
        write(place(tmp_path) / "notes.json", "[")
        assert codes(run(tmp_path)) == {"MOE131", "MOE101"}


class TestInstalled:
    @pytest.fixture
    def installed(self, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def find(name: str) -> Installed | None:
            known = {
                "sglang": environment.Installed("sglang", "0.5.23", shipped / "sglang"),
                "vllm": environment.Installed("vllm", "0.33.0", shipped / "vllm"),
                "triton": environment.Installed("triton", "3.8.0"),
            }
            return known.get(name)

        for module in (lint, planning, environment):
            monkeypatch.setattr(module, "find_installed", find)

    @pytest.mark.usefixtures("installed")
    def test_the_trees_that_are_installed(self) -> None:
        both = lint.lint(LintRequest(installed=True), {})
        assert both.files == 728
        assert {server for server, *_ in both.servers} == {"sglang", "vllm"}
        one = lint.lint(LintRequest(installed=True, server="sglang"), {})
        assert one.files == 390
        assert len(of(one, "MOE142")) == 1

    @pytest.mark.usefixtures("installed")
    def test_case_35_the_variable_hides_what_is_shipped(self, tmp_path: Path) -> None:
        write(place(tmp_path) / UP, GOOD)
        environ = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path)}
        linted = lint.lint(LintRequest(installed=True, server="sglang", gpu="NVIDIA H200"), environ)
        (found,) = of(linted, "MOE133")
        facts = dict(found.facts)
        assert int(facts["files"]) > 50
        assert all("device_name=NVIDIA_H200" in name for name in facts["names"].split(" | "))
        assert UP not in facts["names"].split(" | ")

    @pytest.mark.usefixtures("installed")
    def test_case_35_a_directory_without_configs(self, tmp_path: Path) -> None:
        environ = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path)}
        linted = lint.lint(LintRequest(installed=True, server="sglang"), environ)
        (found,) = of(linted, "MOE105")
        assert found.code.severity is Severity.CRASH

    @pytest.mark.usefixtures("installed")
    def test_vllm_hides_nothing(self, tmp_path: Path) -> None:
        write(tmp_path / UP, GOOD)
        linted = lint.lint(
            LintRequest(installed=True, server="vllm"), {"VLLM_TUNED_CONFIG_FOLDER": str(tmp_path)}
        )
        assert (linted.files, of(linted, "MOE133")) == (339, [])

    def test_nothing_installed_is_an_error(self) -> None:
        with pytest.raises(InputError, match="not installed"):
            lint.lint(LintRequest(installed=True), {})


class TestGuesses:
    @pytest.mark.parametrize(
        ("path", "table", "server"),
        [
            (f"configs/triton_3_6_0/{UP}", GOOD, "sglang"),
            ("E=8,N=64,device_name=X,block_shape=[128, 128].json", GOOD, "sglang"),
            ("E=8,N=64,device_name=X,block_shape=[128,128].json", GOOD, "vllm"),
            ("E=8,N=64,device_name=X_down.json", GOOD, "sglang"),
            (UP, GOOD | {"triton_version": "3.6.0"}, "vllm"),
            (UP, {"8": ENTRY | {"SPLIT_K": 1}}, "vllm"),
            (f"site-packages/vllm/configs/{UP}", GOOD, "vllm"),
            (UP, GOOD, "sglang"),
        ],
    )
    def test_the_server_is_guessed_and_said(self, tmp_path: Path, path: str, table: Any, server: str) -> None:
        linted = run(write(tmp_path / path, table), server=None)
        assert [name for name, *_ in linted.servers] == [server]
        assert any(text.startswith(f"--server {server}: ") for text in linted.assumed)


def test_findings_are_in_order_and_equal_inputs_give_equal_documents(at_home: Linted, shipped: Path) -> None:
    first = at_home.to_json()
    assert json.dumps(first) == json.dumps(run(shipped, server=None).to_json())
    ranks = [Severity(found["severity"]).rank for found in first["findings"]]
    assert ranks == sorted(ranks)


def test_hostile_names_do_not_reach_a_message_raw(tmp_path: Path) -> None:
    name = "E=8,N=64,device_name=\x1b[31mred\u202e.json"
    linted = one(tmp_path, {"\x1b]0;title\x07": ENTRY, "8": ENTRY | {"\x1b[2J": 1}}, name)
    assert linted.findings
    assert all(is_safe(found.message) and is_safe(found.where) for found in linted.findings)


def test_the_page_lists_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text("utf-8")
    rows = re.findall(r"^\| (MOE1\d\d) \| ([a-z ]+) \| (.+) \|$", page, re.M)
    mine = [
        (code.code, code.severity.value, code.title) for code in all_codes().values() if code.code >= "MOE101"
    ]
    assert rows == mine
    assert all(len(all_codes()[code].story) > 100 for code, *_ in rows)
