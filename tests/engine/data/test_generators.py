"""A loader leaves the global generators as they were, and seeds what a data set draws from them."""

import numpy as np
import pytest
from torch.utils.data import Dataset

from hookline.config import ConfigError
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


def test_a_kept_normal_number_that_was_drawn_since_is_gone():
    np.random.seed(1)
    np.random.randn()
    read()
    np.random.randn()  # the kept one, which changes nothing else
    drawn = np.random.get_state()
    read()
    assert np.random.get_state()[2:] == drawn[2:]


def test_another_generator_of_numpy_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        with pytest.raises(ConfigError, match=r"must be MT19937, as usual, .*not PCG64"):
            read()
    finally:
        np.random.set_bit_generator(before)
