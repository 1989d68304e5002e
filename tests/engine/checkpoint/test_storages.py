import io

import pytest
import torch

from hookline.engine.checkpoint.storages import compact, memory_of, replace_tensors, tensors_in


def file_size(data):
    file = io.BytesIO()
    torch.save(data, file)
    return len(file.getvalue())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tensors_in(a), tensors_in(b), strict=True))


def test_tensors_are_found_and_replaced_wherever_they_stand():
    data = {"a": [torch.ones(1), (torch.ones(2), "x")], "b": {"c": torch.ones(3)}, "d": torch.Size([1]), "e": {1}}
    assert [len(tensor) for tensor in tensors_in(data)] == [1, 2, 3]
    doubled = replace_tensors(data, lambda tensor: tensor * 2)
    assert [tensor.sum().item() for tensor in tensors_in(doubled)] == [2, 4, 6]
    assert [tensor.sum().item() for tensor in tensors_in(data)] == [1, 2, 3]
    assert doubled["a"][1][1] == "x"
    assert doubled["d"] == torch.Size([1])


def test_a_small_view_does_not_take_the_whole_with_it():
    whole = torch.randn(1000, 1000)
    data = {"row": whole[3], "corner": whole[:2, :2], "again": whole[3]}
    compacted = compact(data)
    assert same(compacted, data)
    assert file_size(compacted) < 10_000
    assert memory_of(compacted["row"]) == memory_of(compacted["again"])


def test_views_that_make_up_the_whole_stay_views_of_it():
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


def test_one_memory_seen_as_two_types_can_be_saved():
    whole = torch.randn(10)
    data = {"floats": whole, "ints": whole.view(torch.int32)}
    with pytest.raises(RuntimeError, match="different types"):
        file_size(data)
    compacted = compact(data)
    assert file_size(compacted)
    assert same(compacted, data)


def test_sparse_and_empty_tensors_have_no_one_memory():
    tensors = [torch.eye(3).to_sparse(), torch.empty(0)]
    assert [memory_of(tensor) for tensor in tensors] == [None, None]
    assert compact(tensors) is tensors
