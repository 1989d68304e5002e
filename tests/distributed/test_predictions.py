"""Several ranks write predictions into one file, in the order of the data set."""

import csv
import json

import numpy as np
from ranks import run_ranks


def test_uneven_shares_are_predicted_once_and_in_order(tmp_path):
    code, output, results = run_ranks("predictions:main", 2, tmp_path)
    assert code == 0, output
    for size in (7, 3, 1):
        expected = np.array(results[0][f"expected {size}"])
        for name in ("plain", "sharded"):
            folder = tmp_path / name / str(size)
            assert all(result[f"{name} {size} jsonl"] == size for result in results)
            rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
            assert [row["index"] for row in rows] == list(range(size))
            np.testing.assert_allclose([row["prediction"] for row in rows], expected, rtol=1e-5)
            assert not list(folder.glob(".hookline-*"))
        with np.load(tmp_path / f"plain/{size}/predictions.npz") as arrays:
            np.testing.assert_allclose(arrays["prediction"], expected, rtol=1e-5)
        with (tmp_path / f"plain/{size}/predictions.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        np.testing.assert_allclose([float(row["prediction_1"]) for row in table], expected[:, 1], rtol=1e-5)
    csv.field_size_limit(1_000_000)
    with (tmp_path / "texts/predictions.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["text"] for row in table] == results[0]["texts"]
    assert [row["index"] for row in table] == ["0", "1", "2", "3"]
