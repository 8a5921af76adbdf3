"""Requests come in order, and again where the GPU that had them is gone."""

from __future__ import annotations

from moetune.applications.gpu_requests import Requests


def test_requests_come_in_order_and_are_open_until_answered() -> None:
    requests = Requests()
    assert not requests
    assert list(requests.add(["a", "b"])) == [0, 1]
    assert list(requests.add(["c"])) == [2]
    taken = [requests.take() for _ in range(4)]
    assert [item and item[1] for item in taken] == ["a", "b", "c", None]
    for item in taken[:3]:
        assert requests
        assert item is not None
        requests.answers[item[0].number] = item[1].upper() if isinstance(item[1], str) else None
    assert not requests
    assert requests.answers == {0: "A", 1: "B", 2: "C"}


def test_a_request_whose_gpu_is_gone_comes_next() -> None:
    requests = Requests()
    requests.add(["a", "b"])
    first = requests.take()
    assert first is not None
    requests.put_back(first[0])
    assert requests.take() == first
    second = requests.take()
    assert second is not None
    assert second[1] == "b"
