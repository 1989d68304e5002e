"""Predictions for 7, 3 and 1 samples in batches of 2: the shares of two ranks are uneven."""

import torch
from results import write_result
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from hookline.engine import comm
from hookline.engine.data.samplers import InferenceSampler
from hookline.engine.evaluation import write_predictions
from hookline.engine.evaluation.evaluator import outputs_of
from hookline.engine.parallel.fsdp import FSDP2


def predict(model, batch):
    return model(batch[0])


def main(folder):
    torch.manual_seed(0)
    result = {}
    plain = nn.Linear(3, 2)
    sharded = nn.Linear(3, 2)
    sharded.load_state_dict(plain.state_dict())
    sharded = FSDP2(min_params=1).wrap(nn.Sequential(sharded), torch.device("cpu"))
    for size in (7, 3, 1):
        data = TensorDataset(torch.randn(7, 3, generator=torch.Generator().manual_seed(1))[:size])
        loader = DataLoader(data, batch_sampler=BatchSampler(InferenceSampler(size), 2, drop_last=False))
        for name, model, format in (
            ("plain", plain, "jsonl"),
            ("plain", plain, "csv"),
            ("plain", plain, "npz"),
            ("sharded", sharded, "jsonl"),
        ):
            where = str(folder / name / str(size))
            outputs = outputs_of(model, loader, predict)
            result[f"{name} {size} {format}"] = write_predictions(outputs, where, format=format)[1]
        with torch.no_grad():
            result[f"expected {size}"] = plain(data.tensors[0]).tolist()
    texts = ["a\rb", "long " * 40_000, 'a "quote",\r\nmore', "é"]
    half = texts[2 * comm.get_rank() :][:2]
    write_predictions([{"text": half, "score": torch.ones(2)}], str(folder / "texts"), format="csv")
    result["texts"] = texts
    write_result(folder, result)
