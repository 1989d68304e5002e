"""``Trainer`` on several ranks, see ``test_one_call.py``."""

import torch
from results import write_result
from torch import nn
from torch.utils.data import DataLoader

from hookline import Trainer
from hookline.config import ConfigError
from hookline.engine.data import ArrayDataset


def points(size, seed=0):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return ArrayDataset(x, x[:, :3].argmax(1))


def train(folder):
    config = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False}
    options = {
        "loss": nn.CrossEntropyLoss(),
        "metrics": ["Accuracy"],
        "length": 3,
        "seed": 1,
        "output_dir": folder / "run",
        "config": config,
    }
    layer = {"NAME": nn.Linear, "ARGS": {"in_features": 4, "out_features": 3}}
    trainer = Trainer(layer, points(20), points(7, 1), batch_size=4, **options)
    results = trainer.train().metrics
    found = trainer.predict(targets=True, metrics=True)
    try:
        Trainer(layer, DataLoader(points(20), 4), **options)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    write_result(
        folder,
        {
            "accuracy": results["test/accuracy"],
            "predicted": found.metrics["accuracy"],
            "targets": found.targets.tolist(),
            "expected": points(7, 1).tensors[1].tolist(),
            "outputs": found.outputs.tolist(),
            "own_part": sum(len(batch) for batch in trainer.predict(stream=True)),
            "refusal": refusal,
        },
    )
