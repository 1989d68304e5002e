"""Regression on a CSV table: the diabetes data of Efron et al., "Least angle regression" (2004), as in scikit-learn."""

import csv
import os
from pathlib import Path
from typing import Literal

from hookline.engine.data import ArrayDataset, table


def diabetes(split: Literal["train", "test"], folder: str = "./output/data/diabetes") -> ArrayDataset:
    """10 measurements of 442 patients, and the progression of the disease, standardised.

    Args:
        split: "test" has every fifth patient.
        folder: where train.csv and test.csv are written, if they are not there.
    """
    train, test = Path(folder, "train.csv"), Path(folder, "test.csv")
    if not (train.exists() and test.exists()):
        _write(train, test)
    return table(str(train if split == "train" else test), target="progression", task="regression", like=str(train))


def _write(train: Path, test: Path) -> None:
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    mean, std = data.target.mean(), data.target.std()
    rows = [[*x, (y - mean) / std] for x, y in zip(data.data.tolist(), data.target.tolist(), strict=True)]
    train.parent.mkdir(parents=True, exist_ok=True)
    for path, part in ((train, [row for i, row in enumerate(rows) if i % 5]), (test, rows[::5])):
        temporary = path.with_suffix(f".{os.getpid()}")  # several ranks may write at once
        with temporary.open("w", newline="") as file:
            csv.writer(file).writerows([[*data.feature_names, "progression"], *part])
        temporary.replace(path)
