"""Samplers that draw random numbers, and data sets whose length differs by rank: see ``test_data.py``."""

from itertools import chain

import torch
from results import write_result
from torch import nn
from torch.utils.data import IterableDataset, Sampler, Subset

from hookline import Trainer
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, comm, hooks
from hookline.engine.data import ArrayDataset

SAMPLERS = {
    "torch.utils.data:WeightedRandomSampler": {"weights": list(range(1, 33)), "num_samples": 32},
    "data:Own": {},
}


class Own(Sampler):
    """A user's sampler, which draws from torch's generator."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


class Seen(hooks.HookBase):
    """Records the indices of each global batch. Ends the run with an error after step ``last``."""

    uses_indices = True

    def __init__(self, last):
        self.batches, self._last = {}, last

    def after_step(self):
        self.batches[self.trainer.iter] = list(chain(*comm.all_gather(list(self.trainer.sample_indices))))
        if self.trainer.iter == self._last:
            raise KeyError("it was killed")


def train(folder, sampler, resume=False, last=None):
    """Train for two epochs of 8 steps; return the batches by step."""
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.NAME", "MLP", "MODEL.DEVICE", "cpu", "MODEL.ARGS", {"in_features": 8, "num_classes": 4},
        "MODEL.LOSS.NAME", "CrossEntropyLoss", "DATASETS.TRAIN", [{"NAME": "synthetic", "ARGS": {"size": 32}}],
        "DATALOADER.SAMPLER_TRAIN", sampler, "DATALOADER.SAMPLER_ARGS", SAMPLERS[sampler],
        "DATALOADER.BATCH_SIZE", 4, "SOLVER.MAX_ITER", 16, "SOLVER.CHECKPOINT_PERIOD", 3, "LOG.WRITERS", [],
        "SEED", 1, "OUTPUT_DIR", str(folder),
    ])  # fmt: skip
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.register_hooks([seen := Seen(last)])
    try:
        trainer.train()
    except KeyError:
        torch.rand(3 + comm.get_rank())  # the generators of another process are somewhere else
    return seen.batches


def samplers(folder):
    found = {}
    for sampler in SAMPLERS:
        place = folder / sampler.rpartition(":")[2]
        found[sampler] = {"whole": train(place / "whole", sampler)}
        if comm.get_world_size() == 1:
            continue
        train(place / "killed", sampler, last=12)
        found[sampler]["resumed"] = train(place / "killed", sampler, resume=True)
    write_result(folder, found)


def points(size):
    x = torch.randn(size, 8)
    return ArrayDataset(x, x[:, :4].argmax(1))


class Shard(IterableDataset):
    """Splits itself: the ranks' parts differ in length."""

    shares_itself_out = True

    def __len__(self):
        return 10 + comm.get_rank()

    def __iter__(self):
        return iter([(x, x.argmax() % 4) for x in torch.randn(len(self), 8)])


def lengths(folder):
    rank, results = comm.get_rank(), []
    cases = {
        "train": (points(20 + 4 * rank), points(8)),
        "test": (points(20), Subset(points(20), range(8 + rank))),
        "shards": (Shard(), Shard()),
    }
    for name, (train_data, test_data) in cases.items():
        config = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "DATALOADER.ITERS_PER_EPOCH": 3 * (name == "shards")}
        options = {"loss": nn.CrossEntropyLoss(), "batch_size": 4, "length": 2, "config": config}
        layer = {"NAME": nn.Linear, "ARGS": {"in_features": 8, "out_features": 4}}
        try:
            trainer = Trainer(layer, train_data, test_data, output_dir=folder / name, metrics=["Accuracy"], **options)
            trainer.train()
            results.append("")
        except ConfigError as error:
            results.append(str(error))
    write_result(folder, results)
