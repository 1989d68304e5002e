import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset

from hookline.config import ConfigError
from hookline.engine import comm
from hookline.engine.data import InferenceSampler
from hookline.engine.evaluation import prediction_rows, write_predictions
from hookline.engine.modeling import ModelAdapter

BATCH = {"x": torch.ones(2, 4), "label": torch.tensor([1, 0]), "id": ["a", "b"]}
SCORES = torch.tensor([[0.0, 2.0], [3.0, 1.0]])


def columns(names, outputs=SCORES, batch=BATCH):
    return next(prediction_rows([(batch, outputs)], names, ModelAdapter()))


def test_all_outputs_are_the_default():
    assert columns([]) is SCORES


def test_class_probability_target_and_entries_of_the_batch(tmp_path):
    pairs = [(BATCH, SCORES), (BATCH, SCORES)]
    found = prediction_rows(pairs, ["id", "target", "class", "probability"], ModelAdapter())
    path, count = write_predictions(found, str(tmp_path))
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert count == len(lines) == 4
    expected = SCORES.softmax(1).amax(1).tolist()
    assert lines[1] == {"index": 1, "id": "b", "target": 0, "class": 0, "probability": pytest.approx(expected[1])}
    assert lines[2]["class"] == 1


def test_binary_scores_and_named_outputs():
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
    pairs = [(batch, torch.stack([batch[0] == 3, batch[0] != 3], 1).float()) for batch in loader]
    rows = list(prediction_rows(pairs, ["file", "class_name"], ModelAdapter(), loader))
    files = [file for row in rows for file in row["file"]]
    assert files == [f"photos/{number}.png" for number in ([7, 5, 3], [1, 0])[rank]]
    assert [name for row in rows for name in row["class_name"]] == [["dog", "dog", "cat"], ["dog", "dog"]][rank]


@pytest.mark.parametrize(
    ("names", "outputs", "batch", "message"),
    [
        (["idd"], SCORES, BATCH, r"PREDICTIONS_COLUMNS: 'idd' is not.*which has x, label, id"),
        (["id"], SCORES, (torch.ones(2, 4), torch.ones(2)), r"'id' is not.*which is no dict"),
        (["file"], SCORES, (torch.ones(2, 4), torch.ones(2)), "'file' is not.*of a data set with classes or files"),
        (["class"], {"boxes": SCORES, "sizes": SCORES}, BATCH, "'class' needs scores"),
        (["probability"], torch.ones(2, 3, 4), BATCH, "'probability' needs scores"),
    ],
)
def test_columns_that_there_are_not(names, outputs, batch, message):
    with pytest.raises(ConfigError, match=message):
        columns(names, outputs, batch)
