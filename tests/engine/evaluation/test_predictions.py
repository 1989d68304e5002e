"""Rows of predictions, and their columns."""

import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset

from hookline.config import ConfigError
from hookline.engine import comm
from hookline.engine.data import InferenceSampler
from hookline.engine.evaluation import write_predictions
from hookline.engine.evaluation.predictions import prediction_rows
from hookline.engine.modeling import ModelAdapter

BATCHES = [{"x": torch.arange(6.0).reshape(3, 2)}, {"x": torch.arange(6.0, 10.0).reshape(2, 2)}]


def double(batch):
    return {"twice": 2 * batch["x"], "name": [f"s, {int(x[0])}\n" for x in batch["x"]]}


def test_each_sample_is_a_line_with_its_index_and_outputs(tmp_path):
    path = tmp_path / "inference/set/predictions.jsonl"
    assert write_predictions(map(double, BATCHES), str(path)) == 5
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    assert rows[3] == {"index": 3, "twice": [12.0, 14.0], "name": "s, 6\n"}
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [entry.name for entry in (tmp_path / "inference/set").iterdir()] == ["predictions.jsonl"]


def test_arrays_equal_the_models_outputs(tmp_path):
    outputs = [{"a": batch["x"].double(), "b": (batch["x"] > 3)[:, 0]} for batch in BATCHES]
    write_predictions(outputs, str(tmp_path / "predictions.npz"))
    with np.load(tmp_path / "predictions.npz") as arrays:
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
        ([torch.tensor([1, 2]), torch.tensor([3])], {"prediction": [1, 2]}),
        (Output(torch.tensor([0.5, 1.0])), {"logits": 0.5}),
        (namedtuple("Pair", "a b")(torch.tensor([1]), ["x"]), {"a": 1, "b": "x"}),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), {"prediction": 1.5}),
    ],
)
def test_outputs_of_all_usual_forms_are_rows(tmp_path, outputs, expected):
    write_predictions([outputs], str(tmp_path / "a.jsonl"))
    with open(tmp_path / "a.jsonl") as file:
        assert json.loads(file.readline()) == {"index": 0, **expected}


@pytest.mark.parametrize(
    ("outputs", "format", "message"),
    [
        ([torch.tensor(1.0)], "jsonl", "'prediction'"),
        ([{"a": torch.zeros(2), "b": torch.zeros(3)}], "jsonl", "one value per sample"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "npz", "use jsonl"),
        ([[{"a": 1}, {"b": 2}]], "npz", "Python objects"),
        ([{"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}], "npz", "differ in names"),
        ([{"a": ["x"]}, {"a": torch.zeros(1)}], "npz", "a text for some samples"),
        ([{"file": torch.zeros(1)}], "npz", "'file'"),
    ],
)
def test_outputs_that_cannot_be_written_are_an_error_and_keep_the_old_file(tmp_path, outputs, format, message):
    old = tmp_path / f"predictions.{format}"
    old.write_text("old")
    with pytest.raises((ConfigError, TypeError), match=message):
        write_predictions(outputs, str(old))
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


def test_without_samples_the_file_is_empty(tmp_path):
    for format in ("jsonl", "npz"):
        assert write_predictions([], str(tmp_path / f"predictions.{format}")) == 0


BATCH = {"x": torch.ones(2, 4), "label": torch.tensor([1, 0]), "id": ["a", "b"]}
SCORES = torch.tensor([[0.0, 2.0], [3.0, 1.0]])


def columns(names, outputs=SCORES, batch=BATCH):
    return next(prediction_rows([(batch, outputs)], names, ModelAdapter()))


def test_class_probability_target_and_entries_of_the_batch(tmp_path):
    pairs = [(BATCH, SCORES), (BATCH, SCORES)]
    found = prediction_rows(pairs, ["id", "target", "class", "probability"], ModelAdapter())
    path = tmp_path / "rows.jsonl"
    count = write_predictions(found, str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert count == len(lines) == 4
    expected = SCORES.softmax(1).amax(1).tolist()
    assert lines[1] == {"index": 1, "id": "b", "target": 0, "class": 0, "probability": pytest.approx(expected[1])}
    assert lines[2]["class"] == 1


def test_binary_scores_and_named_outputs():
    assert columns([])["prediction"] is SCORES
    assert columns(["class"], torch.tensor([0.5, -0.5]))["class"].tolist() == [1, 0]
    assert columns(["probability"], torch.tensor([[0.0], [0.0]]))["probability"].tolist() == [0.5, 0.5]
    found = columns(["prediction", "class"], {"logits": SCORES, "size": torch.ones(2)})
    assert list(found) == ["logits", "size", "class"]


class Photos(TensorDataset):
    classes = ("cat", "dog")
    files = tuple((f"photos/{number}.png", number % 2) for number in range(8))


@pytest.mark.parametrize("rank", [0, 1])
def test_names_of_classes_and_files_of_the_rows_of_each_rank(monkeypatch, rank):
    monkeypatch.setattr(comm, "get_data_rank", lambda: rank)
    monkeypatch.setattr(comm, "get_data_size", lambda: 2)
    data = Subset(Photos(torch.arange(8)), [7, 5, 3, 1, 0])
    loader = DataLoader(data, batch_sampler=BatchSampler(InferenceSampler(5), 2, drop_last=False))
    pairs = [(tuple(batch), torch.stack([batch[0] == 3, batch[0] != 3], 1).float()) for batch in loader]
    rows = list(prediction_rows(pairs, ["file", "class_name"], ModelAdapter(), loader))
    files = [file for row in rows for file in row["file"]]
    assert files == [f"photos/{number}.png" for number in ([7, 5, 3], [1, 0])[rank]]
    assert [name for row in rows for name in row["class_name"]] == [["dog", "dog", "cat"], ["dog", "dog"]][rank]


def test_columns_that_there_are_not():
    pair = (torch.ones(2, 4), torch.ones(2))
    for name, outputs, batch, message in (
        ("idd", SCORES, BATCH, r"PREDICTIONS_COLUMNS: 'idd'.*x, label, id"),
        ("id", SCORES, pair, "'id'"),
        ("file", SCORES, pair, "'file'"),
        ("class", {"boxes": SCORES, "sizes": SCORES}, BATCH, "'class'"),
        ("probability", torch.ones(2, 3, 4), BATCH, "'probability'"),
    ):
        with pytest.raises(ConfigError, match=message):
            columns([name], outputs, batch)
