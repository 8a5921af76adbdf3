"""Published files of nearby problems: nearest first, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moetune.applications.catalogue import nearby, tuned_files
from moetune.applications.environment import published_tree
from moetune.applications.file_meaning import Sizes, meaning_of
from moetune.domain.catalogue import published
from moetune.domain.file_names import parse_file_name
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.servers.protocol import Server

H100 = "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def a_problem(server: Server) -> Problem:
    name = parse_file_name(f"{H100}.json")
    assert name is not None
    meaning = meaning_of(server, name, find_gpu("NVIDIA H100 80GB HBM3"), Sizes(hidden=2048, topk=8))
    assert meaning is not None
    return meaning.problem


class TestCatalogue:
    def files(self, gpu: str, server: str = "sglang", **changes: Any) -> list[Any]:
        release = open_server(server)
        problem = replace(a_problem(release), gpu=find_gpu(gpu), **changes)
        index = published(server)
        assert index is not None
        return list(tuned_files(release, problem, (published_tree(index),)))

    def test_the_problem_itself_is_first_and_all_have_a_reason(self) -> None:
        found = self.files("NVIDIA H200", E=128, N=192, file_n=192)
        best = found[0]
        assert (best.name.E, best.name.N, best.gpu.torch_name) == (128, 192, "NVIDIA H200")
        assert best.confidence == "high"
        assert "the same GPU" in best.reason
        assert "the same shape" in best.reason
        assert all(file.reason and file.confidence in ("high", "medium", "low") for file in found)
        assert [file.cost for file in found] == sorted(file.cost for file in found)

    def test_neighbouring_shapes_say_what_differs(self) -> None:
        found = self.files("NVIDIA H200", E=128, N=208, file_n=208)
        near = next(file for file in found if (file.name.E, file.name.N) == (128, 192))
        assert "N 192 instead of 208" in near.reason
        assert near.confidence != "high"
        assert all(abs(file.name.E / 128) <= 4 and file.name.N <= 4 * 208 for file in found)

    def test_other_dtypes_and_unlike_silicon_are_left_out(self) -> None:
        found = self.files(RTX, E=128, N=192, file_n=192)
        assert {file.name.dtype for file in found} == {""}
        assert all("H100" not in file.gpu.torch_name and "B200" not in file.gpu.torch_name for file in found)

    def test_a_mig_slice_is_offered_its_whole_gpu_at_low_confidence_only(self) -> None:
        found = self.files("NVIDIA H100 80GB HBM3 MIG 3g.40gb", E=128, N=192, file_n=192)
        assert {file.gpu.torch_name for file in found} == {"NVIDIA H100 80GB HBM3"}
        assert {file.confidence for file in found} == {"low"}

    def test_another_servers_files_are_offered_and_named(self) -> None:
        found = self.files("NVIDIA H200", "vllm", E=128, N=192, file_n=192)
        assert {file.server for file in found} == {"vllm", "sglang"}
        assert all("a file of sglang" in file.reason for file in found if file.server == "sglang")

    def test_what_the_server_finds_itself_is_not_nearby(self) -> None:
        server = open_server("vllm")
        problem = replace(a_problem(server), gpu=find_gpu("NVIDIA H200"), E=128, N=192, file_n=192)
        index = published("vllm")
        assert index is not None
        own = server.file_name(problem, "up")
        paths = [near.path for near in nearby(server, problem, "up", (published_tree(index),))]
        assert paths
        assert all(not path.endswith(f"fused_moe/configs/{own}") for path in paths)
