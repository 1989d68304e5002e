"""Data, solver and writers as projects of detectron2 write them: trained, stopped and resumed."""

import pytest
import torch
from ranks import rows
from starts import arguments
from torch import nn

from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, default_setup, hooks
from hookline.engine.data import DatasetFromList, MapDataset, build_batch_data_loader
from hookline.engine.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from hookline.engine.solver.lr_scheduler import WarmupMultiStepLR
from hookline.hooks import CommonMetricPrinter, EventWriter, JSONWriter, get_event_storage

DICTS = [{"label": i % 2, "annotations": [{"category_id": i % 2}] * (i % 3)} for i in range(12)]


class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc = nn.Linear(4, cfg.MODEL.MY_HEAD.CLASSES)

    def forward(self, batch):
        x, y = torch.stack([d["x"] for d in batch]), torch.tensor([d["label"] for d in batch])
        return {"loss_cls": nn.functional.cross_entropy(self.fc(x), y)}


class Weighted(TrainingSampler):
    """Sets the attributes of its base itself, and yields a stream of its own."""

    def __init__(self, size, weights, seed):
        self._size, self._seed, self._shuffle, self._rank, self._world_size = size, seed, True, 0, 1
        self.weights = torch.as_tensor(weights)

    def _infinite_indices(self):
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        while True:
            yield from torch.multinomial(self.weights, self._size, replacement=True, generator=generator).tolist()


def mapper(sample):
    return {**sample, "x": torch.rand(4) + sample["label"]}


class Printer(CommonMetricPrinter):
    def write(self):
        storage = get_event_storage()
        if storage.iter == self._max_iter:
            return
        self.logger.info("%s %s %d", self._get_eta(storage), sorted(storage.histories()), storage.iter)


class Latest(EventWriter):
    def __init__(self):
        self.names = set()

    def write(self):
        self.names |= set(get_event_storage().latest_with_smoothing_hint(20))


class Trainer(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        return Net(cfg)

    @classmethod
    def build_optimizer(cls, cfg, model):
        assert cfg.SOLVER.OPTIMIZER == "ADAMW"
        return torch.optim.AdamW(model.parameters(), cfg.SOLVER.BASE_LR)

    @classmethod
    def build_lr_scheduler(cls, cfg, optimizer):
        return WarmupMultiStepLR(optimizer, cfg.SOLVER.STEPS, warmup_iters=cfg.SOLVER.WARMUP_ITERS)

    @classmethod
    def build_train_loader(cls, cfg):
        if cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler":
            factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
                DICTS, cfg.DATALOADER.REPEAT_THRESHOLD
            )
            sampler = RepeatFactorTrainingSampler(factors, seed=1)
        else:
            sampler = Weighted(len(DICTS), [1.0] * len(DICTS), seed=1)
        dataset = MapDataset(DatasetFromList(DICTS, copy=False), mapper)
        return build_batch_data_loader(dataset, sampler, cfg.SOLVER.IMS_PER_BATCH, seed=cfg.SEED)

    def build_writers(self):
        self.latest = Latest()
        return [Printer(self.max_iter), JSONWriter(f"{self.cfg.OUTPUT_DIR}/metrics.json"), self.latest]


def add_my_config(cfg):
    cfg.MODEL.MY_HEAD = CfgNode()
    cfg.MODEL.MY_HEAD.CLASSES = 2
    cfg.SOLVER.OPTIMIZER = "ADAMW"
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.DATALOADER.REPEAT_THRESHOLD = 0.6


def train(folder, sampler, resume=False, stop=None):
    cfg = get_cfg()
    add_my_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = "Net"
    # Names of what the trainer builds itself: they are not checked.
    cfg.SOLVER.LR_SCHEDULER_NAME, cfg.DATASETS.TRAIN = "MyPoly", ("mine",)
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATALOADER.SAMPLER_TRAIN = sampler
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.SOLVER.MAX_ITER = 12
    cfg.SOLVER.STEPS = (8,)
    cfg.SOLVER.WARMUP_ITERS = 3
    cfg.SEED = 1
    cfg.OUTPUT_DIR = str(folder)
    default_setup(cfg, arguments(resume=resume))
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=resume)
    if stop is not None:
        trainer.register_hooks(
            [hooks.CallbackHook(after_step=lambda t: t.request_stop("enough", 75) if t.iter == stop else None)]
        )
    trainer.train()
    return trainer


@pytest.mark.parametrize("sampler", ["WeightedSampler", "RepeatFactorTrainingSampler"])
def test_a_resumed_run_equals_the_whole_one(tmp_path, sampler):
    whole = train(tmp_path / "whole", sampler)
    train(tmp_path / "parts", sampler, stop=4)
    resumed = train(tmp_path / "parts", sampler, resume=True)
    assert resumed.start_iter == 5
    assert torch.equal(resumed.model.fc.weight, whole.model.fc.weight)
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert {"loss_cls", "total_loss", "lr"} <= resumed.latest.names
    assert rows(tmp_path / "parts")[-1]["iteration"] == 11
