"""What must hold for the whole tree: it stands alone, stays light, and says what it does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import moetune

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).parents[1]
BASE_DEPENDENCIES = {"numpy", "click", "rich", "nvidia-ml-py", "tomli"}
HEAVY = ("torch", "triton", "numpy", "transformers", "huggingface_hub", "sklearn")

# Put together from parts, so that this file does not name them either.
MACHINES = re.compile(
    "|".join(
        [
            r"(?<![\w.~])/(?:wo" + r"rk|fa" + r"rm)/",
            r"\.\./sha" + "red",
            r"/ro" + r"ot/\.",
            r"/opt/wh" + "eels",
        ]
    )
)
REGISTRIES = (
    "pypi" + ".org",
    "python" + "hosted",
    "npm" + "js",
    "deb" + ".debian",
    "download.py" + "torch",
    "ana" + "conda.org",
)


def tracked_files() -> list[Path]:
    """Files of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def text_files() -> list[tuple[str, str]]:
    """Name and text of each text file."""
    found = []
    for path in tracked_files():
        try:
            found.append((str(path.relative_to(ROOT)), path.read_text("utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def base_requirements(requirements: list[str]) -> set[str]:
    return {requirement_name(entry) for entry in requirements if "extra ==" not in entry}


class TestAlone:
    def test_there_are_files_to_look_at(self) -> None:
        names = [name for name, _ in text_files()]
        assert "src/moetune/domain/gpu.py" in names
        assert "tests/test_repository.py" in names

    def test_no_file_names_a_machine_or_a_folder_outside(self) -> None:
        lines = [
            f"{name}:{number}: {line.strip()[:100]}"
            for name, text in text_files()
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINES.search(line)
        ]
        assert lines == []

    def test_no_file_names_a_package_registry(self) -> None:
        hits = [(name, host) for name, text in text_files() for host in REGISTRIES if host in text.lower()]
        assert hits == []

    def test_no_file_of_a_server_and_no_pickle_is_committed(self) -> None:
        names = [path.relative_to(ROOT) for path in tracked_files()]
        assert not [
            name for name in names if name.suffix in {".pt", ".pth", ".pkl", ".pickle", ".joblib", ".whl"}
        ]
        tables = [name for name in names if name.name.startswith("E=") and "tests" not in name.parts]
        # The examples hold tables that moetune wrote, each with its provenance and unchanged since.
        assert {name.parts[0] for name in tables} <= {"examples"}
        for name in tables:
            if not name.name.endswith(".provenance.json"):
                beside = json.loads((ROOT / f"{name}.provenance.json").read_bytes())
                content = (ROOT / name).read_bytes()
                assert beside["config_sha256"] == hashlib.sha256(content).hexdigest(), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that a user would install."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.glob("moetune-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel_metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


class TestWheel:
    def test_base_dependencies_are_few_and_known(self, wheel_metadata: Message) -> None:
        assert base_requirements(wheel_metadata.get_all("Requires-Dist") or []) == BASE_DEPENDENCIES

    def test_nothing_of_a_servers_environment_is_moved_or_pinned(self, wheel_metadata: Message) -> None:
        base = [entry for entry in wheel_metadata.get_all("Requires-Dist") or [] if "extra ==" not in entry]
        wanted = [entry.partition(";")[0] for entry in base]
        assert not [entry for entry in wanted if "==" in entry or "<" in entry]
        assert "numpy" in base

    def test_a_reader_of_toml_is_installed_only_where_python_has_none(self, wheel_metadata: Message) -> None:
        (tomli,) = (entry for entry in wheel_metadata.get_all("Requires-Dist") or [] if "tomli" in entry)
        assert re.search(r"; python_version < ['\"]3\.11['\"]$", tomli)

    def test_it_holds_every_file_of_the_package_and_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        package = ROOT / "src"
        sources = {str(path.relative_to(package)) for path in tracked_files() if package in path.parents}
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert sources <= held
        assert "moetune/py.typed" in held
        assert {name.partition("/")[0] for name in held} == {"moetune"}

    def test_it_says_what_it_is(self, wheel: zipfile.ZipFile, wheel_metadata: Message) -> None:
        assert wheel_metadata["Requires-Python"] == ">=3.10"
        assert wheel_metadata["License-Expression"] == "Apache-2.0"
        assert wheel_metadata["Version"] == moetune.__version__
        licence = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
        assert "Apache License" in wheel.read(licence[0]).decode()
        (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        text = wheel.read(points).decode()
        assert "moetune = moetune.cli.main:main" in text
        assert "[moetune.servers]" in text


class TestLight:
    def imported(self, code: str, *arguments: str) -> list[str]:
        """Heavy packages that a fresh interpreter has imported after some code."""
        report = f"\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
        run = subprocess.run(
            [sys.executable, "-c", code + report, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        found: list[str] = json.loads(run.stdout.splitlines()[-1])
        return found

    def test_what_is_counted_as_heavy_is_seen_when_it_is_imported(self) -> None:
        assert self.imported("import numpy") == ["numpy"]

    def test_importing_moetune_is_light(self) -> None:
        assert self.imported("import moetune") == []

    def test_help_is_light(self) -> None:
        code = (
            "import sys; from moetune.cli.main import main\n"
            "try:\n    sys.exit(main())\nexcept SystemExit as end:\n    assert not end.code, end.code"
        )
        assert self.imported(code, "--help") == []

    def test_detecting_gpus_and_servers_is_light(self) -> None:
        code = (
            "from moetune.applications.nvml import detect_gpus; detect_gpus()\n"
            "from moetune.applications.environment import inspect_environment; inspect_environment()"
        )
        assert self.imported(code) == []

    def test_only_the_measuring_layer_imports_torch_and_triton(self) -> None:
        code = (
            "import importlib, pkgutil, moetune\n"
            "for module in pkgutil.walk_packages(moetune.__path__, 'moetune.'):\n"
            "    if not (module.name + '.').startswith('moetune.measure.'):\n"
            "        importlib.import_module(module.name)"
        )
        assert not {"torch", "triton", "transformers", "huggingface_hub"} & set(self.imported(code))


class TestData:
    def packaged(self) -> list[str]:
        package = ROOT / "src" / "moetune"
        return [
            str(path.relative_to(package))
            for path in tracked_files()
            if package in path.parents and path.suffix != ".py"
        ]

    def test_every_packaged_file_is_read_through_the_import_system(self) -> None:
        names = self.packaged()
        assert {"py.typed", "domain/data/gpus.csv"} <= set(names)
        for name in names:
            data = resources.files("moetune").joinpath(*name.split("/")).read_bytes()
            assert data or name == "py.typed"

    def test_no_packaged_file_is_large(self) -> None:
        sizes = {name: (ROOT / "src" / "moetune" / name).stat().st_size for name in self.packaged()}
        assert {name: size for name, size in sizes.items() if size >= 1_000_000} == {}


class TestDocuments:
    def test_the_version_is_the_same_everywhere(self) -> None:
        assert metadata.version("moetune") == moetune.__version__
        assert f"## [{moetune.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")

    @pytest.mark.parametrize(
        "document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.name
    )
    def test_paths_and_targets_that_a_document_names_exist(self, document: Path) -> None:
        text = document.read_text("utf-8")
        paths = re.findall(r"`((?:src|tests|training|benchmarks|docs|\.ci)/[\w./-]*)`", text)
        assert [path for path in paths if not (ROOT / path).exists()] == []
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        assert [link for link in links if not (document.parent / link).exists()] == []
        makefile = (ROOT / "Makefile").read_text("utf-8")
        targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
        assert set(re.findall(r"`make ([\w-]+)", text)) <= targets

    def test_ci_runs_the_same_tests_as_people_do(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        text = script.read_text("utf-8")
        assert "set -euo pipefail" in text
        assert re.search(r"^make test$", text, re.M)
        makefile = (ROOT / "Makefile").read_text("utf-8")
        for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"):
            assert tool in makefile
