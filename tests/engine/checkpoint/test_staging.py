import io
import os

import pytest
import torch

from hookline.engine.checkpoint.staging import Staging, compact, memory_of, replace_tensors, tensors_in


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


def test_a_copy_does_not_change_with_the_state():
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


def test_the_next_copy_reuses_the_memory():
    staging = Staging()
    first = staging.copy(state(0))
    addresses = [memory_of(tensor) for tensor in tensors_in(first)]
    second = staging.copy(state(1))
    assert [memory_of(tensor) for tensor in tensors_in(second)] == addresses
    assert same(second, state(1))


@pytest.mark.parametrize("width", [2, 500])
def test_a_state_of_another_size_is_copied(width):
    staging = Staging()
    staging.copy(state(0, 50))
    assert same(staging.copy(state(1, width)), state(1, width))


def test_a_state_without_tensors_is_copied():
    assert Staging().copy({"iteration": 3}) == {"iteration": 3}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_free_releases_the_memory():
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
def test_a_copy_from_a_gpu_holds_the_state_at_the_call():
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


def file_size(data):
    file = io.BytesIO()
    torch.save(data, file)
    return len(file.getvalue())


def same_tensors(a, b):
    return all(torch.equal(x, y) for x, y in zip(tensors_in(a), tensors_in(b), strict=True))


def test_tensors_are_found_and_replaced_at_any_depth():
    data = {"a": [torch.ones(1), (torch.ones(2), "x")], "b": {"c": torch.ones(3)}, "d": torch.Size([1]), "e": {1}}
    assert [len(tensor) for tensor in tensors_in(data)] == [1, 2, 3]
    doubled = replace_tensors(data, lambda tensor: tensor * 2)
    assert [tensor.sum().item() for tensor in tensors_in(doubled)] == [2, 4, 6]
    assert [tensor.sum().item() for tensor in tensors_in(data)] == [1, 2, 3]
    assert doubled["a"][1][1] == "x"
    assert doubled["d"] == torch.Size([1])


def test_a_small_view_is_saved_without_the_rest_of_its_memory():
    whole = torch.randn(1000, 1000)
    data = {"row": whole[3], "corner": whole[:2, :2], "again": whole[3]}
    compacted = compact(data)
    assert same_tensors(compacted, data)
    assert file_size(compacted) < 10_000
    assert memory_of(compacted["row"]) == memory_of(compacted["again"])


def test_views_that_cover_their_memory_are_not_copied():
    whole = torch.randn(1000)
    data = [whole[:400], whole[400:], whole.view(10, 100)]
    assert compact(data) is data


def test_tied_weights_are_saved_once():
    weight = torch.randn(100, 100)
    data = compact({"embedding": weight, "head": weight.detach(), "transposed": weight.T})
    assert file_size(data) < 1.2 * file_size({"embedding": weight})


def test_an_expanded_tensor_stays_small():
    data = {"ones": torch.ones(1).expand(1_000_000)}
    assert file_size(compact(data)) < 5_000


def test_views_of_the_same_memory_as_two_types_can_be_saved():
    whole = torch.randn(10)
    data = {"floats": whole, "ints": whole.view(torch.int32)}
    with pytest.raises(RuntimeError, match="different types"):
        file_size(data)
    compacted = compact(data)
    assert file_size(compacted)
    assert same_tensors(compacted, data)


def test_memory_of_is_none_for_sparse_and_empty_tensors():
    tensors = [torch.eye(3).to_sparse(), torch.empty(0)]
    assert [memory_of(tensor) for tensor in tensors] == [None, None]
    assert compact(tensors) is tensors
