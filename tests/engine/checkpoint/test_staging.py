import os

import pytest
import torch

from hookline.engine.checkpoint.staging import Staging
from hookline.engine.checkpoint.storages import memory_of, tensors_in


def state(seed=0, width=5):
    torch.manual_seed(seed)
    weight = torch.randn(width, 7)
    return {
        "weight": weight,
        "tied": weight.detach(),
        "part": weight[1:, ::2],
        "steps": [torch.tensor(3.0), torch.arange(3, dtype=torch.int16), torch.empty(0, 4)],
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "sparse": torch.eye(3).to_sparse(),
        "lr": 0.1,
    }


def same(a, b):
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return a["lr"] == b["lr"] and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.to_dense(), y.to_dense()) for x, y in pairs
    )


def test_a_copy_stays_as_it_was_when_the_state_changes():
    staging, data = Staging(), state()
    copy = staging.copy(data)
    staging.wait()
    assert same(copy, data)
    for tensor in tensors_in(data):
        tensor.zero_()
    assert same(copy, state())


def test_tensors_that_share_memory_share_it_in_the_copy():
    copy = Staging().copy(state())
    assert memory_of(copy["weight"]) == memory_of(copy["tied"]) == memory_of(copy["part"])
    assert copy["part"].stride() == state()["part"].stride()
    assert memory_of(copy["weight"]) != memory_of(copy["half"])


def test_memory_is_used_again_by_the_next_copy():
    staging = Staging()
    first = staging.copy(state(0))
    addresses = [memory_of(tensor) for tensor in tensors_in(first)]
    second = staging.copy(state(1))
    assert [memory_of(tensor) for tensor in tensors_in(second)] == addresses
    assert same(second, state(1))


@pytest.mark.parametrize("width", [2, 500])
def test_a_state_of_another_size_is_copied_as_well(width):
    staging = Staging()
    staging.copy(state(0, 50))
    assert same(staging.copy(state(1, width)), state(1, width))


def test_a_state_without_tensors_is_copied():
    assert Staging().copy({"iteration": 3}) == {"iteration": 3}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_is_given_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    data = {"weight": torch.ones(25_000_000)}
    staging, before = Staging(), resident()
    copy = staging.copy(data)
    assert 90e6 < resident() - before < 120e6
    staging.copy(data)
    assert resident() - before < 120e6
    del copy
    staging.free()
    assert resident() - before < 20e6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_of_the_moment_it_was_asked_for():
    staging, weight = Staging(), torch.zeros(50_000_000, device="cuda")
    for value in (1.0, 2.0):
        weight.fill_(value)
        copy = staging.copy({"weight": weight})
        weight.fill_(-1.0)  # queued behind the copy
        staging.wait()
        assert copy["weight"].is_pinned()
        assert torch.equal(copy["weight"], torch.full((50_000_000,), value))
    del copy
    staging.free()
