"""Several ranks write predictions into one file, in the order of the data set."""

import csv
import json

import numpy as np
import pytest
from ranks import SYNTHETIC, finish, fork, run_ranks, tool


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


@pytest.mark.slow
def test_two_processes_predict_the_same_as_one(tmp_path):
    common = ["--config-file", SYNTHETIC, "MODEL.DEVICE", "cpu", "SEED", "3"]
    code, output = finish(fork(tool(*common, "SOLVER.MAX_ITER", "5", "OUTPUT_DIR", "run"), tmp_path))
    assert code == 0, output
    found = []
    for ranks in (1, 2):
        options = ["--predict", "--num-gpus", ranks, "MODEL.WEIGHTS", "run/model_final.pth", "OUTPUT_DIR", f"p{ranks}"]
        code, output = finish(fork(tool(*common, *options), tmp_path))
        assert code == 0, output
        path = tmp_path / f"p{ranks}/inference/synthetic/predictions.jsonl"
        assert f"p{ranks}/inference/synthetic/predictions.jsonl: 256 samples" in output
        found.append([json.loads(line)["prediction"] for line in path.read_text().splitlines()])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    # An unknown format is refused at the start.
    code, output = finish(fork(tool(*common, *options, "TEST.PREDICTIONS_FORMAT", "cvs"), tmp_path))
    assert code == 2
    assert output.startswith("error: TEST.PREDICTIONS_FORMAT: unknown format 'cvs'")
