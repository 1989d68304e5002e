"""Classification of a table: Wolberg et al., Breast Cancer Wisconsin (Diagnostic), UCI (1995), as in scikit-learn."""

from typing import Literal

import torch

from hookline.engine.data import ArrayDataset


def tumours(split: Literal["train", "test"]) -> ArrayDataset:
    """30 measurements of 569 tumours, standardised, and labels 0 (malignant), 1 (benign).

    Args:
        split: "test" has every fifth tumour.
    """
    from sklearn.datasets import load_breast_cancer

    x, y = map(torch.from_numpy, load_breast_cancer(return_X_y=True))
    test = torch.arange(len(x)) % 5 == 0
    x = ((x - x[~test].mean(0)) / x[~test].std(0)).float()
    chosen = test if split == "test" else ~test
    return ArrayDataset(x[chosen], y[chosen].long())
