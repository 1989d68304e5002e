from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hookline.hooks.common.digest import digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
]


@dataclass
class Sample:
    image: torch.Tensor
    name: str


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 40_001])
def test_every_bit_counts(dtype, size):
    values = torch.randint(0, 2, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    assert values.numel() == size
    equal = digest([values.clone()])
    assert equal.shape == ()
    assert equal.dtype is torch.int64
    assert digest([values]) == equal
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128) if dtype is not torch.bool else (1,):
            changed = values.clone()
            changed.view(torch.uint8)[place * dtype.itemsize] ^= bit
            assert digest([changed]) != equal


def test_negating_and_exchanging_values_count():
    values = torch.randn(6)
    seen = {digest(values).item(), digest(-values).item(), digest(values.flip(0)).item()}
    seen |= {digest(torch.cat([-values[:2], values[2:]])).item()}
    assert len(seen) == 4


def test_shape_dtype_and_split_count_but_not_strides():
    zeros = torch.zeros(4)
    forms = [zeros, zeros[:3], zeros.reshape(2, 2), zeros.int(), zeros[:0], [zeros[:2], zeros[2:]], [zeros], None]
    assert len({digest(form).item() for form in forms}) == len(forms)
    image = torch.randn(2, 3, 4, 4)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last))
    assert digest(image[:, 1:]) == digest(image[:, 1:].clone())


def test_expanded_tensors_and_single_elements_with_a_stride():
    assert digest(torch.tensor(1.5).expand(4)) == digest(torch.full((4,), 1.5))
    assert digest(torch.arange(3.0)[1::2][:1]) == digest(torch.tensor([1.0]))
    assert digest(torch.zeros(4).as_strided((1, 1), (0, 3))) == digest(torch.zeros(1, 1))


def test_many_tensors_of_several_dtypes():
    tensors = [torch.randn(1000).to(dtype) for dtype in (torch.float32, torch.bfloat16) for _ in range(50)]
    before = digest(tensors)
    tensors[3], tensors[4] = tensors[4], tensors[3]
    assert digest(tensors) != before


def test_sparse_nested_and_complex_conjugates():
    one = torch.eye(3)
    assert digest(one.to_sparse()) != digest((2 * one).to_sparse())
    jagged = [torch.nested.nested_tensor([one, other], layout=torch.jagged) for other in (one, -one)]
    assert digest(jagged[0]) != digest(jagged[1])
    numbers = torch.randn(3, dtype=torch.complex64)
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj()) != digest(numbers)


def test_batches_of_any_form():
    image = torch.randn(2, 2)
    forms = [
        {"image": image, "name": "a"},
        {"image": image, "name": "b"},
        {"image": image.numpy(), "name": "a", "more": np.array(["text", None], dtype=object)},
        Sample(image, "a"),
        Sample(image, "b"),
        SimpleNamespace(image=image, name="a"),
        SimpleNamespace(image=-image, name="a"),
        (image, {"a", "b"}),
        (image, range(3)),
        (image, 1.0),
        (image, 1),
    ]
    digests = [digest(form).item() for form in forms]
    assert len(set(digests)) == len(forms)
    assert digests == [digest(form).item() for form in forms]
    assert digest(Sample(image.clone(), "a")).item() == digests[3]


def test_a_value_that_contains_itself():
    value: list = [1]
    value.append(value)
    assert digest(value) == digest(value)


def test_a_value_without_content():
    assert digest([iter([1]), object(), (x for x in [1]), len, Sample]).shape == ()


def test_a_sequence_may_be_a_list_or_a_tuple():
    image = torch.ones(3)
    assert digest((image, (1, 2), [(image,), 3])) == digest([image, [1, 2], ((image,), 3)])


def test_an_object_that_cannot_be_saved():
    class Locked:
        def __reduce_ex__(self, protocol):
            raise RuntimeError("not here")

    assert digest([Locked()]).shape == ()
