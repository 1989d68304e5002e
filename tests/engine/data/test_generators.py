"""A loader leaves the global generators as they were, and seeds what a data set draws from them."""

import numpy as np
import pytest
from torch.utils.data import Dataset

from hookline.engine.data import SeededLoader


class Normal(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.random.randn()


def read():
    return next(iter(SeededLoader(Normal(), seed=3, num_workers=0))).item()


def test_a_normal_number_that_numpy_has_kept_is_not_drawn_by_a_data_set():
    np.random.seed(0)
    expected = read()
    np.random.seed(1)
    np.random.randn()  # numpy keeps a second one
    kept = np.random.get_state()
    assert read() == expected
    now = np.random.get_state()
    assert (now[1] == kept[1]).all()
    assert now[2:] == kept[2:]


@pytest.mark.parametrize("draws", [0, 1])
def test_another_generator_of_numpy_is_restored(draws):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        for _ in range(draws):
            np.random.randn()
        state = np.random.get_state(legacy=False)
        read()
        assert np.random.get_state(legacy=False) == state
    finally:
        np.random.set_bit_generator(before)
