"""The examples of docs/deploy.md, run as they stand as far as a machine without Docker or kubectl can."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.applications.install_world import install_package, shipped_files, texts, write
from tests.cli.conftest import clean_environment
from tests.servers.sglang_loader import World, load_lookup

DOCUMENT = Path(__file__).parents[1] / "docs" / "deploy.md"
BLOCK = re.compile(r"<!-- test: ([\w -]+) -->\n```(\w+)\n(.*?)```\n", re.S)
EXAMPLES: dict[str, tuple[str, str]] = {
    name: (language, text) for name, language, text in BLOCK.findall(DOCUMENT.read_text("utf-8"))
}
HOME = "sglang/srt/layers/moe/moe_runner/triton_utils"
# What Kubernetes asks of the keys of a ConfigMap (apimachinery, IsConfigMapKey).
CONFIGMAP_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def example(name: str, language: str) -> str:
    found, text = EXAMPLES[name]
    assert found == language
    return text


def run(script: str, cwd: Path, path: Path | None = None, **variables: str) -> str:
    """Run a shell script that finds `moetune` and `python` of this interpreter."""
    own = Path(sys.executable).parent
    search = (
        os.pathsep.join(str(folder) for folder in (path, own) if folder) + os.pathsep + os.environ["PATH"]
    )
    environment = clean_environment(
        PATH=search, HOME=str(cwd), XDG_STATE_HOME=str(cwd / "state"), **variables
    )
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def found_by_sglang(root: Path, device: str, triton: str = "3.8.0") -> bool:
    real = load_lookup("0.5.23", World(device=device, triton=triton, folder=str(root)))
    return bool(real.get_moe_configs(256, 256, None)) and real.logger.lines[-1][0] == "INFO"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `moetune tune` writes for SGLang 0.5.23 and one GPU."""
    folder = tmp_path_factory.mktemp("made")
    run(
        "moetune tune Qwen/Qwen3.5-122B-A10B --tp 4 --offline --gpu 'NVIDIA H200' --no-compile "
        "--server sglang --server-version 0.5.23 --out moetune-configs --exit-zero",
        folder,
    )
    return folder / "moetune-configs"


@pytest.fixture
def here(tmp_path: Path, made: Path) -> Path:
    write(tmp_path / "moetune-configs", texts(made))
    return tmp_path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """SGLang 0.5.23 as installed, as far as moetune looks at it."""
    with pytest.MonkeyPatch.context() as own:
        install_package(tmp_path / "site", own, "sglang", "0.5.23", shipped_files("sglang", "0.5.23"))
    metadata = {"triton-3.8.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: triton\nVersion: 3.8.0\n"}
    return write(tmp_path / "site", metadata)


def test_every_command_stands_in_an_example_that_is_run() -> None:
    text = DOCUMENT.read_text("utf-8")
    outside = BLOCK.sub("", text)
    blocks = re.findall(r"```\w+\n(.*?)```", outside, re.S)
    # Only what needs a network is not run.
    assert all(
        line.startswith(("pip download", "pip install")) for block in blocks for line in block.splitlines()
    )
    assert len(EXAMPLES) == 9


def test_the_image(tmp_path: Path, site: Path) -> None:
    text = example("dockerfile", "dockerfile")
    lines = text.replace("\\\n", " ").splitlines()
    assert [line.split()[0] for line in lines] == ["ARG", "FROM", "RUN", "RUN"]
    command = lines[-1].removeprefix("RUN ")
    assert command.startswith("moetune tune")
    # The image compiles what it chose; here that would only take long.
    command = command.replace("/opt/", f"{tmp_path}/") + " --no-compile"
    before = texts(site)
    run(command, tmp_path, PYTHONPATH=str(site))
    devices = [
        word
        for before, word in zip(shlex.split(command), shlex.split(command)[1:], strict=False)
        if before == "--gpu"
    ]
    assert len(devices) == 3
    for device in devices:
        assert found_by_sglang(site / HOME, device)
    run("moetune uninstall", tmp_path, PYTHONPATH=str(site))
    assert texts(site) == before


def test_a_stage_of_its_own(tmp_path: Path) -> None:
    run(example("stage", "sh").replace("--exit-zero", "--exit-zero --no-compile"), tmp_path)
    assert found_by_sglang(tmp_path / "moe-configs", "NVIDIA H200")


def test_the_configmap(here: Path) -> None:
    (here / "configmap.py").write_text(example("configmap script", "python"))
    run(example("configmap", "sh"), here)
    configmap = json.loads((here / "configmap.json").read_text())
    volume = json.loads((here / "objects.json").read_text())["volume"]
    assert configmap["kind"] == "ConfigMap"
    assert all(CONFIGMAP_KEY.fullmatch(key) for key in configmap["data"])
    assert len(json.dumps(configmap)) < 1 << 20
    # The kubelet puts each key at its path, through links.
    mounted = here / "mounted"
    for item in volume["configMap"]["items"]:
        assert ".." not in item["path"].split("/")
        write(mounted / "..2026", {item["path"]: configmap["data"][item["key"]]})
    (mounted / "..data").symlink_to("..2026")
    (mounted / "configs").symlink_to("..data/configs")
    assert found_by_sglang(mounted, "NVIDIA H200")


def test_names_of_config_files_are_no_keys(here: Path) -> None:
    names = [path.name for path in (here / "moetune-configs").rglob("E=*.json")]
    assert names
    assert not any(CONFIGMAP_KEY.fullmatch(name) for name in names)


def test_the_pod(here: Path) -> None:
    yaml: Any = importlib.import_module("yaml")
    (here / "configmap.py").write_text(example("configmap script", "python"))
    run(example("configmap", "sh"), here)
    spec = yaml.safe_load(example("pod", "yaml"))["spec"]
    (container,), (volume,) = spec["containers"], spec["volumes"]
    (variable,), (mount,) = container["env"], container["volumeMounts"]
    assert variable == {"name": "SGLANG_MOE_CONFIG_DIR", "value": mount["mountPath"]}
    assert mount["name"] == volume["name"]
    # It has the shape of what the script prints.
    printed = json.loads((here / "objects.json").read_text())["volume"]
    assert volume.keys() == printed.keys()
    assert volume["configMap"].keys() == printed["configMap"].keys()
    (item,) = volume["configMap"]["items"]
    assert item.keys() == printed["configMap"]["items"][0].keys()
    assert CONFIGMAP_KEY.fullmatch(item["key"])
    assert re.fullmatch(r"configs/triton_[0-9_]+/E=\d+,.*, 128\]\.json", item["path"])


def test_site_packages_that_cannot_be_written(here: Path, site: Path) -> None:
    said = run(example("read-only", "sh"), here, PYTHONPATH=str(site))
    assert "; found" in said
    root = here / "moe-configs"
    assert found_by_sglang(root, "NVIDIA H200")
    real = load_lookup("0.5.23", World(device="NVIDIA_H100_80GB_HBM3", triton="3.8.0", folder=str(root)))
    assert real.get_moe_configs(512, 256, "fp8_w8a8", 128, 128)


def test_without_a_network(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_size": 3072,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 48,
    }
    write(tmp_path, {"checkpoint/config.json": json.dumps(config)})
    run(example("offline", "sh").replace("--exit-zero", "--exit-zero --no-compile"), tmp_path)
    assert found_by_sglang(tmp_path / "moe-configs", "NVIDIA H200")


def test_the_workflow(here: Path) -> None:
    yaml: Any = importlib.import_module("yaml")
    workflow = yaml.safe_load(example("workflow", "yaml"))
    command = workflow["jobs"]["configs"]["steps"][-1]["run"]
    repository = here / "moetune-configs"
    run(command, repository)
    (bad,) = repository.rglob("E=*_down.json")
    bad.write_text('{"triton_version": "3.8.0"}')
    with pytest.raises(AssertionError, match="MOE102"):
        run(command, repository)


def test_several_machines(here: Path, site: Path) -> None:
    """With an ssh and an rsync that go to folders of this machine."""
    tools = write(
        here / "tools",
        {
            "ssh": '#!/bin/bash\nhost=$1; shift; cd "$MACHINES/$host"\n'
            'export HOME="$PWD" XDG_STATE_HOME="$PWD/state" PYTHONPATH="$PWD/site"\nexec "$@"\n',
            "rsync": '#!/bin/bash\ncp -r "$2" "$MACHINES/${3%:}/"\n',
        },
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for host in ("node-a", "node-b"):
        write(here / "machines" / host / "site", texts(site))
    said = run(example("machines", "sh"), here, tools, MACHINES=str(here / "machines"))
    assert said.count("; found") == 4
    for host in ("node-a", "node-b"):
        assert found_by_sglang(here / "machines" / host / "site" / HOME, "NVIDIA H200")
