import sys

import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.data import ArrayDataset, get_dataset


def test_array_dataset_gathers_a_batch_equal_to_its_samples():
    dataset = ArrayDataset(torch.randn(10, 3), torch.arange(10))
    rows, labels = dataset.__getitems__([7, 0, 7])
    assert labels.tolist() == [7, 0, 7]
    assert torch.equal(rows[0], dataset[7][0])
    assert len(dataset) == 10


def test_array_dataset_refuses_tensors_of_different_lengths():
    with pytest.raises(ValueError, match="the same length"):
        ArrayDataset(torch.zeros(3), torch.zeros(4))


def test_digits_are_normalised_and_split_the_same_way_every_time():
    train, test = get_dataset("digits_train", "DATASETS.TRAIN"), get_dataset("digits_test", "DATASETS.TEST")
    x, y = train.tensors
    assert (x.shape, x.dtype, y.dtype) == ((1442, 1, 8, 8), torch.float32, torch.int64)
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-3)
    assert len(test) == 355
    # the split is part of every published number: it must not move
    assert y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert test.tensors[1].bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert test.tensors[1][:12].tolist() == [5, 0, 9, 8, 7, 1, 2, 6, 3, 4, 0, 2]


def test_synthetic_data_depends_on_its_seed_and_keeps_its_task():
    def build(**args):
        return get_dataset({"NAME": "synthetic", "ARGS": args}, "DATASETS.TRAIN[0].ARGS").tensors

    x, y = build(size=400, shape=[3, 2], num_classes=3, seed=1)
    assert x.shape == (400, 3, 2)
    assert torch.equal(x, build(size=400, shape=[3, 2], num_classes=3, seed=1)[0])
    other_x, other_y = build(size=400, shape=[3, 2], num_classes=3, seed=2)
    assert not torch.equal(x, other_x)
    for label in range(3):
        assert torch.allclose(x[y == label].mean(0), other_x[other_y == label].mean(0), atol=0.2)


def test_a_wrong_argument_is_named_with_its_key():
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN\[0\]\.ARGS\.sise"):
        get_dataset({"NAME": "synthetic", "ARGS": {"sise": 4}}, "DATASETS.TRAIN[0].ARGS")


def test_a_missing_scikit_learn_is_an_error_that_says_what_to_install(monkeypatch):
    from hookline.engine.data import datasets

    datasets._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'hookline\[digits\]'"):
        get_dataset("digits_train", "DATASETS.TRAIN")
