"""Regression on a table: the diabetes data of Efron et al., "Least angle regression" (2004), as in scikit-learn."""

from typing import Literal

import torch

from hookline.engine.data import ArrayDataset


def diabetes(split: Literal["train", "test"]) -> ArrayDataset:
    """10 measurements of 442 patients, and the progression of the disease, standardised.

    Args:
        split: "test" has every fifth patient.
    """
    from sklearn.datasets import load_diabetes

    x, y = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
    test = torch.arange(len(x)) % 5 == 0
    x, y = ((v - v[~test].mean(0)) / v[~test].std(0) for v in (x, y[:, None]))
    chosen = test if split == "test" else ~test
    return ArrayDataset(x[chosen], y[chosen])


def mean_squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The metric: the mean over all samples of (prediction - target) squared."""
    return (predictions - targets).square().mean()
