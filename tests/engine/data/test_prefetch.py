"""Prefetching to a GPU."""

import pytest
import torch

from hookline.engine.data import EpochIterator
from hookline.engine.data.prefetch import CudaPrefetcher


def test_without_workers_batches_are_not_prefetched():
    drawn = []

    class Loader:
        num_workers = 0

        def __iter__(self):
            for number in range(3):
                drawn.append(number)
                yield number

    batches = EpochIterator(Loader(), device=torch.device("cuda"))
    next(batches)
    assert drawn == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_complete_and_in_order():
    host = [{"x": torch.full((1000, 100), float(i)).pin_memory(), "name": str(i)} for i in range(20)]
    for number, batch in enumerate(CudaPrefetcher(iter(host), torch.device("cuda"))):
        assert batch["x"].is_cuda
        assert batch["name"] == str(number)
        assert (batch["x"] == number).all()
    assert number == 19


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_error_comes_with_the_step_that_reads_the_batch():
    def batches():
        yield torch.zeros(2)
        yield torch.ones(2)
        raise ValueError("a truncated image")

    prefetched = CudaPrefetcher(batches(), torch.device("cuda"))
    assert [next(prefetched).sum().item() for _ in range(2)] == [0, 2]
    with pytest.raises(ValueError, match="truncated"):
        next(prefetched)
