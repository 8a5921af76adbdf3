"""The records of installs: what they hold comes back, and any order of taking back ends at the start."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.applications.atomic import Attributes
from moetune.applications.install_plan import InstallRequest, prepare_install
from moetune.applications.installing import install
from moetune.applications.installs import status
from moetune.applications.manifest import (
    Content,
    Entry,
    Install,
    Manifest,
    check_manifest,
    check_target,
    install_id,
    open_ledger,
)
from moetune.applications.uninstalling import UninstallRequest, uninstall
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import MoetuneError, OutputError
from tests.applications.install_world import DOWN, FOLDER, UP, snapshot, table, texts, write

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = "E=8,N=256,device_name=NVIDIA_H200.json"
DIGESTS = st.sampled_from(["0" * 64, "1" * 64, "a" * 64])
CONTENTS = st.none() | st.builds(
    Content,
    DIGESTS,
    st.builds(
        Attributes,
        st.integers(0, 0o777),
        st.integers(-1, 1 << 31),
        st.integers(-1, 1 << 31),
        st.integers(-(1 << 62), 1 << 62),
        st.integers(0, 1 << 62),
    ),
)
PATHS = st.sampled_from([f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}", OTHER])
ENTRIES = st.lists(
    st.builds(
        Entry, st.sampled_from([f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}", OTHER]), st.none() | DIGESTS, CONTENTS
    ),
    min_size=1,
    unique_by=lambda entry: entry.path,
).map(tuple)
INSTALLS = st.builds(
    lambda entries, root: Install(
        install_id(root, entries), "sglang", "0.5.23", "3.8.0", root, "root", ("/source",), entries
    ),
    ENTRIES,
    st.sampled_from(["/a", "/b c"]),
)
MANIFESTS = st.lists(INSTALLS, unique_by=lambda one: one.id).map(lambda installs: Manifest(tuple(installs)))


@given(MANIFESTS)
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    check_manifest(manifest)
    assert from_json(Manifest, json.loads(json.dumps(to_json(manifest))), "it") == manifest


@given(MANIFESTS, st.data())
def test_what_is_left_is_still_a_manifest(manifest: Manifest, data: st.DataObject) -> None:
    for install_ in manifest.installs:
        paths = data.draw(st.frozensets(st.sampled_from(install_.paths)))
        manifest = manifest.without(install_.id, paths)
        check_manifest(manifest)
        assert not any(one.id == install_.id and set(one.paths) & paths for one in manifest.installs)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["schema", "installs", "entries", "path", "root", "id"]), inner)
        ),
    )
)
@settings(max_examples=60)
def test_any_manifest_is_read_or_refused(document: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with open_ledger(Path(folder), writing=True) as ledger:
            ledger.write_manifest(Manifest())
        held = {"schema": "moetune.installs/1", **document} if isinstance(document, dict) else document
        (Path(folder) / "installs" / "manifest.json").write_text(json.dumps(held))
        try:
            status(Path(folder), {})
        except MoetuneError as error:
            assert "not what moetune writes" in error.message  # noqa: PT017 - both ends are right


@pytest.mark.parametrize(
    "path",
    [
        f"{FOLDER}/{UP}",
        f"{FOLDER}/{UP}.provenance.json",
        UP,
        "configs/triton_3_10_0/E=1,N=1,device_name=Orin_(nvgpu),dtype=fp8_w8a8,block_shape=[128, 128].json",
    ],
)
def test_paths_that_servers_read(path: str) -> None:
    check_target(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "configs",
        f"configs/{UP}",
        f"configs/triton_/{UP}",
        f"configs/triton_3_6_0/x/{UP}",
        f"configs//triton_3_6_0/{UP}",
        f"/configs/triton_3_6_0/{UP}",
        f"configs/triton_3_6_0_bak/{UP}",
        f"configs/triton_3.6.0/{UP}",
        f"configs/triton_3_6_0/{UP}\n",
        f"configs/triton_3_6_0\n/{UP}",
        f"{FOLDER}/{UP}.provenance.json.provenance.json",
        f"{FOLDER}/E=1,N=1,device_name=...json",
        f"{FOLDER}/triton_3_6_0_bak",
    ],
)
def test_paths_that_no_server_reads(path: str) -> None:
    with pytest.raises(OutputError):
        check_target(path)


@pytest.fixture(scope="module", autouse=True)
def _no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", int)
        yield


BACK: st.SearchStrategy[Any] = st.booleans()
FILES: st.SearchStrategy[Any] = st.dictionaries(
    st.sampled_from([UP, OTHER]), st.sampled_from([16, 32, 64]), min_size=1
)


@settings(max_examples=40)
@given(st.data())
def test_installs_taken_back_in_any_order_end_at_the_start(data: st.DataObject) -> None:
    """Against a model: a path shows the newest install that is still there, else what was there."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        root, state = base / "root", base / "state"
        root.mkdir()
        there = data.draw(st.sets(st.sampled_from([UP, OTHER])))
        write(root, {f"{FOLDER}/{name}": table(128) for name in sorted(there)})
        before = snapshot(root)
        standing: dict[str, dict[str, int]] = {}
        for step in range(data.draw(st.integers(1, 6))):
            if standing and data.draw(BACK):
                gone = list(standing)[data.draw(st.integers(0, len(standing) - 1))]
                uninstall(UninstallRequest(what=gone, root=root, state=state), {})
                del standing[gone]
            else:
                files = data.draw(FILES)
                source = write(base / f"source{step}", {name: table(size) for name, size in files.items()})
                request = InstallRequest(
                    paths=(source,),
                    server="sglang",
                    server_version="0.5.12",
                    triton_version="3.6.0",
                    root=root,
                    state=state,
                )
                shown = texts(root)
                done = install(prepare_install(request, {}), {})
                new = {n: s for n, s in files.items() if shown.get(f"{FOLDER}/{n}") != table(s)}
                assert bool(done.id) is bool(new)
                if new:
                    standing.pop(done.id, None)
                    standing[done.id] = new
            for name in (UP, OTHER):
                top = [files[name] for files in standing.values() if name in files]
                expected = table(top[-1]) if top else table(128) if name in there else None
                assert texts(root).get(f"{FOLDER}/{name}") == expected
            assert [one.install.id for one in status(state, {}).installs] == list(standing)
        if standing:
            uninstall(UninstallRequest(all=True, root=root, state=state), {})
        assert snapshot(root) == before
        assert not list(state.rglob("blobs/*"))
