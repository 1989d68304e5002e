import csv
import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hookline.config import ConfigError
from hookline.engine.evaluation import predict_dataset, write_predictions

BATCHES = [{"x": torch.arange(6.0).reshape(3, 2)}, {"x": torch.arange(6.0, 10.0).reshape(2, 2)}]


def double(batch):
    return {"twice": 2 * batch["x"], "name": [f"s, {int(x[0])}\n" for x in batch["x"]]}


def test_each_sample_is_a_line_with_its_index_and_outputs(tmp_path):
    path, count = predict_dataset(double, BATCHES, str(tmp_path / "inference/set"))
    assert (path, count) == (str(tmp_path / "inference/set/predictions.jsonl"), 5)
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    assert rows[3] == {"index": 3, "twice": [12.0, 14.0], "name": "s, 6\n"}
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [entry.name for entry in (tmp_path / "inference/set").iterdir()] == ["predictions.jsonl"]


def test_a_table_has_a_column_for_each_number(tmp_path):
    path, _ = predict_dataset(double, BATCHES, str(tmp_path), format="csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[3] == {"index": "3", "twice_0": "12.0", "twice_1": "14.0", "name": "s, 6\n"}
    assert len(rows) == 5


def test_a_table_has_columns_for_nested_and_missing_values(tmp_path):
    outputs = {"a": [{"b": [1, 2.5], "c": None}], "d": torch.ones(1, 2, 1, dtype=torch.bool), "e": ['x,"y"']}
    path, _ = write_predictions([outputs], str(tmp_path), format="csv")
    with open(path, newline="") as file:
        header, row = csv.reader(file)
    assert header == ["index", "a_b_0", "a_b_1", "a_c", "d_0_0", "d_1_0", "e"]
    assert row == ["0", "1", "2.5", "", "True", "True", 'x,"y"']


def test_arrays_equal_the_models_outputs(tmp_path):
    def predict(model, batch):
        return {"a": model(batch), "b": (batch["x"] > 3)[:, 0]}

    path, _ = predict_dataset(lambda batch: batch["x"].double(), BATCHES, str(tmp_path), format="npz", predict=predict)
    with np.load(path) as arrays:
        assert arrays["a"].dtype == np.float64
        assert np.array_equal(arrays["a"], np.arange(10.0).reshape(5, 2))
        assert arrays["b"].tolist() == [False, False, True, True, True]


@dataclass
class Output:
    logits: torch.Tensor
    hidden: None = None


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (torch.tensor([1, 2]), {"prediction": 1}),
        ([torch.tensor([1, 2]), torch.tensor([3])], {"prediction": [1, 2]}),
        (Output(torch.tensor([0.5, 1.0])), {"logits": 0.5}),
        (namedtuple("Pair", "a b")(torch.tensor([1]), ["x"]), {"a": 1, "b": "x"}),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), {"prediction": 1.5}),
    ],
)
def test_outputs_of_all_usual_forms_are_rows(tmp_path, outputs, expected):
    path, _ = write_predictions([outputs], str(tmp_path))
    with open(path) as file:
        assert json.loads(file.readline()) == {"index": 0, **expected}


@pytest.mark.parametrize(
    ("outputs", "format", "message"),
    [
        ([torch.tensor(1.0)], "jsonl", "'prediction' is a single number, not"),
        ([{"a": torch.zeros(2), "b": torch.zeros(3)}], "jsonl", "one value per sample"),
        ([{"index": torch.zeros(2)}], "jsonl", "the column of the sample's index"),
        ([{"a": [object()]}], "jsonl", "cannot be written as JSON"),
        ([{}], "jsonl", "outputs are empty"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "npz", "npz cannot hold it; use jsonl"),
        ([[[1], [1, 2]]], "csv", "sample 1 has the columns"),
        ([{"a": [1]}, {"b": [2]}], "csv", "sample 1 has the columns"),
        ([{"a": [{"b": object()}]}], "csv", "cannot be written as JSON"),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "npz", "one before had"),
        ([], "jsno", "did you mean 'jsonl'"),
    ],
)
def test_outputs_that_cannot_be_written_are_an_error_and_keep_the_old_file(tmp_path, outputs, format, message):
    old = tmp_path / f"predictions.{format}"
    old.write_text("old")
    with pytest.raises(ConfigError, match=message):
        write_predictions(outputs, str(tmp_path), format=format)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_batches_are_written_one_by_one(tmp_path):
    seen = []

    def outputs():
        for index in range(3):
            yield torch.full((1000,), float(index))
            seen.append(len(list(tmp_path.glob(".hookline-tmp-*/rows.txt"))) == 1)

    assert write_predictions(outputs(), str(tmp_path))[1] == 3000
    assert seen == [True] * 3


def test_without_samples_the_file_is_empty(tmp_path):
    for format in ("jsonl", "csv", "npz"):
        assert write_predictions([], str(tmp_path), format=format) == (str(tmp_path / f"predictions.{format}"), 0)
