"""What two ranks do together outside of training steps: exchange, evaluate, predict, share a batch."""

import json
import logging
import os
import random
import time
from argparse import Namespace
from itertools import product
from logging.handlers import BufferingHandler

import numpy as np
import pytest
import torch
import torchmetrics
from parts import CPU, points
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from hookline import Trainer
from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, SimpleTrainer, TrainerBase, begin_run, comm, default_setup
from hookline.engine.checkpoint.sharded_checkpointer import ShardedCheckpointer
from hookline.engine.data import DATASET_REGISTRY, GlobalBatchSampler, ShardedIterable, TrainingSampler
from hookline.engine.data.samplers import InferenceSampler
from hookline.engine.evaluation import DatasetEvaluator, verify_results, write_predictions
from hookline.engine.evaluation.metrics import collect
from hookline.engine.parallel import FSDP2, Strategy
from hookline.engine.parallel.copies import share_weights
from hookline.hooks import CallbackHook, EarlyStopping, EvalHook

# ---------------------------------------------------------------------- exchanges


def check_ranks_exchange_objects_and_numbers(folder):
    rank = comm.get_rank()
    assert (comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()) == (2, rank, 2)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [str(rank), "2", str(rank)]
    assert comm.is_main_process() == (rank == 0)
    assert comm.broadcast_object({"from": rank}, src=1) == {"from": 1}
    assert comm.all_gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.gather("x" * (rank + 1), dst=1) == ([], ["x", "xx"])[rank]
    np.random.seed(rank)
    assert len(set(comm.all_gather(comm.shared_random_seed()))) == 1
    assert (comm.all_reduce_sum(rank + 1), comm.all_reduce_sum(rank + 0.5)) == (3, 2.0)
    assert comm.all_reduce_sum(torch.tensor([1.5 + rank])).tolist() == [4.0]
    values = {"a": torch.tensor(1.0 + rank), "b": torch.tensor(10.0 * (1 + rank))}
    losses = {name: values[name] for name in ("ab", "ba")[rank]}  # each rank has its own order
    means, sums = comm.reduce_dict(losses), comm.reduce_dict(losses, average=False)
    assert rank or (means, sums) == ({"a": 1.5, "b": 15.0}, {"a": 3.0, "b": 30.0})
    assert collect([torch.full((rank + 1,), rank)]).tolist() == [0, 1, 1]
    with comm.main_process_first():
        assert (folder / "cache").exists() == bool(rank)
        if rank == 0:
            time.sleep(0.2)
            (folder / "cache").touch()
    with comm.main_process_first(local=False):
        pass
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=comm.get_local_process_group())
    assert total == 2
    comm.create_local_process_group(1)
    assert torch.distributed.get_world_size(comm._local_group(torch.distributed.group.WORLD, 1)) == 1
    assert comm.on_main_process(lambda: rank) == 0

    def fail():
        raise ConfigError(f"rank {rank} cannot read the file")

    with pytest.raises(ConfigError, match="rank 0 cannot"):
        comm.on_main_process(fail)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        comm.on_main_process(lambda: os.listdir("nowhere"))


def check_an_option_of_the_script_may_differ_between_ranks(folder):
    cfg = get_cfg()
    cfg.merge_from_list(["OUTPUT_DIR", str(folder), "MODEL.DEVICE", "cpu"])
    default_setup(cfg, Namespace(predict=comm.get_rank()))
    begin_run(cfg)
    assert (folder / "config.yaml").exists()


def check_every_group_has_the_timeout_of_the_run(folder):
    checkpointer = ShardedCheckpointer(nn.Linear(1, 1), str(folder))
    groups = [torch.distributed.group.WORLD, comm.object_group(), comm.get_local_process_group(), checkpointer._group]
    limits = [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]
    assert [*limits, comm.timeout().total_seconds()] == [60] * 5


def check_weights_and_buffers_of_any_dtype_start_as_those_of_rank_0(folder):
    rank = comm.get_rank()
    model = nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.LazyLinear(2))
    kinds = [torch.bool, torch.int16, torch.float64, torch.bfloat16, torch.complex64]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"b{number}", torch.full((3,), 1 - rank, dtype=kind))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    torch.nn.init.constant_(model[0].weight, 1 - rank)
    share_weights(model)
    assert [model[0].weight.sum(), *(abs(model.get_buffer(f"b{n}").sum()) for n in range(5))] == [72, *[3] * 5]


# ---------------------------------------------------------------------- the ranks' data


class Shard(IterableDataset):
    """Splits itself: the ranks' parts differ in length."""

    shares_itself_out = True

    def __len__(self):
        return 10 + comm.get_rank()

    def __iter__(self):
        return iter([(x, x.argmax() % 3) for x in torch.randn(len(self), 6)])


def trainer_of(folder, train, test, **options):
    config = {"MODEL.DEVICE": "cpu", "LOG.WRITERS": [], "LOG.PROGRESS_BAR": False, **options.pop("config", {})}
    options = {"loss": nn.CrossEntropyLoss(), "metrics": ["Accuracy"], "length": 2, "seed": 1, **options}
    layer = {"NAME": nn.Linear, "ARGS": {"in_features": 6, "out_features": 3}}
    return Trainer(layer, train, test, output_dir=folder / "run", config=config, **options)


def check_data_sets_must_be_as_long_on_each_rank(folder):
    rank, test = comm.get_rank(), points(8)
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN: .* 24 samples on rank 1, and 20 on rank 0"):
        trainer_of(folder, points(20 + 4 * rank), test, batch_size=4)
    with pytest.raises(ConfigError, match=r"(?s)DATASETS\.TEST.* 8 samples on rank 1, and 7 on rank 0"):
        trainer_of(folder, points(20), Subset(test, range(7 + rank)), batch_size=4).train()
    trainer_of(folder, Shard(), Shard(), batch_size=4, config={"DATALOADER.ITERS_PER_EPOCH": 3}).train()


def check_each_rank_resumes_its_own_part_of_a_loader_with_a_state(folder):
    def stateful():
        data = TensorDataset(*points(28).tensors)
        return StatefulDataLoader(data, 2, sampler=DistributedSampler(data), num_workers=1)

    def train(name, data, length, **options):
        seen = []
        note = CallbackHook(after_fetch=lambda trainer, batch: seen.append(batch[0].tolist()))
        trainer_of(folder / name, data(), None, metrics=[], length=length, hooks=[note], **options).train(resume=True)
        return seen

    for data, workers in ((stateful, 0), (Shard, 2)):
        settings = {"DATALOADER": {"NUM_WORKERS": workers, "ITERS_PER_EPOCH": 5}}
        options = {} if data is stateful else {"batch_size": 4, "config": settings}
        name = f"{data.__name__}{workers}"
        whole = train(name, data, 12, **options)
        assert train(f"{name}, resumed", data, 9, **options) == whole[:9]
        assert train(f"{name}, resumed", data, 12, **options) == whole[9:]
        ranks = comm.all_gather(str(whole))
        assert ranks[0] != ranks[1]


class Unseeded(Sampler):
    """Draws from a generator that nobody can seed."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(self.size), self.size))


def check_an_order_that_differs_by_rank_is_an_error_in_the_first_step(folder):
    config = {"DATALOADER.SAMPLER_TRAIN": Unseeded}
    with pytest.raises(RuntimeError, match="read the samples of the training data in different orders"):
        trainer_of(folder, points(20), points(8), batch_size=4, config=config).train()
    Unseeded.__iter__ = lambda self: iter(torch.randperm(self.size).tolist())
    trainer_of(folder, points(20), points(8), batch_size=4, config=config).train()


class Shared(Strategy):
    data_rank, data_size = 0, 1


def check_samplers_and_predictions_use_the_data_ranks(folder):
    rank, model = comm.get_rank(), nn.Linear(1, 1)
    assert len(InferenceSampler(5)) == (3, 2)[rank]
    # The loader is built before the data ranks are set.
    loader = DataLoader([torch.zeros(1)] * 6, batch_sampler=GlobalBatchSampler(range(6), 4))
    with pytest.raises(ConfigError, match="into 2 parts, and the data_size of the strategy Shared is 1"):
        SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.1), strategy=Shared())
    for place, size, found in ((0, 2, "(0, 2), (0, 2)"), (rank, 1 + rank, "(0, 1), (1, 2)"), (0, 0, "(0, 0), (0, 0)")):
        with pytest.raises(ConfigError) as error:
            comm.set_data_ranks(place, size)
        assert f"[{found}]" in str(error.value)
    comm.set_data_ranks(0, 1)
    assert list(GlobalBatchSampler(range(6), 4)) == [[0, 1, 2, 3], [4, 5]]
    assert list(InferenceSampler(5)) == [0, 1, 2, 3, 4]
    assert next(iter(TrainingSampler(5, shuffle=False))) == 0
    trainer = SimpleTrainer(model, [torch.zeros(1)], torch.optim.SGD(model.parameters(), 0.1))
    outputs = trainer.predict([torch.arange(3.0)], predict=lambda model, batch: batch)
    assert write_predictions(outputs, str(folder / "predictions.jsonl")) == 3
    comm.set_data_ranks(rank, 2)


# ---------------------------------------------------------------------- evaluation


@DATASET_REGISTRY.register()
def stream(size: int = 7):
    dataset = DATASET_REGISTRY.build("synthetic", {"size": size, "seed": 1})
    return ShardedIterable([dataset[index] for index in range(size)])


def of_all(predictions, targets, inputs):
    """A metric that is called with all samples."""
    return {"samples": len(predictions), "sum": inputs.double().sum(), "first_class": int((targets == 0).sum())}


class Entries(torchmetrics.Metric):
    """Keeps a list with an entry for each sample, as torchmetrics' metrics of detection do."""

    def __init__(self):
        super().__init__()
        self.add_state("entries", default=[], dist_reduce_fx=None)

    def update(self, preds, target):
        self.entries += [row[: 1 + int(label)] for row, label in zip(preds, target, strict=True)]

    def compute(self):
        return torch.tensor(sum(map(len, self.entries)))


def evaluation(name, size):
    confusion = {"NAME": "torchmetrics:ConfusionMatrix", "ARGS": {"task": "multiclass", "num_classes": 4}}
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "MODEL.DEVICE", "cpu",
        "MODEL.LOSS.NAME", "CrossEntropyLoss", "DATASETS.TRAIN", ["synthetic"],
        "TEST.METRICS", ["Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}}, "Loss", "together:of_all", confusion,
                         "together:Entries"],
        "DATASETS.TEST", [{"NAME": name, "ARGS": {"size": size, "seed": 1} if name == "synthetic" else {"size": size}}],
        "DATALOADER.TEST_BATCH_SIZE", 2, "OUTPUT_DIR", "unused", "SEED", 1,
    ])  # fmt: skip
    return cfg


def check_metrics_are_those_of_all_samples_on_every_rank(folder):
    for name, size in product(("synthetic", "stream"), (1, 7)):  # of 1 sample, the second rank has none
        cfg = evaluation(name, size)
        torch.manual_seed(0)
        model = DefaultTrainer.build_model(cfg)
        found = DefaultTrainer.test(cfg, model)[name]
        x, y = DATASET_REGISTRY.build("synthetic", {"size": size, "seed": 1}).tensors
        with torch.no_grad():
            scores = model(x)
        confusion = torch.zeros(4, 4).index_put((y, scores.argmax(1)), torch.ones(size), accumulate=True)
        matrix = found.pop("multiclass_confusion_matrix")
        assert [list(row.values()) for row in matrix.values()] == confusion.tolist(), name
        assert found == {
            "accuracy": pytest.approx((scores.argmax(1) == y).double().mean()),
            "accuracy_top2": pytest.approx((scores.topk(2)[1] == y[:, None]).any(1).double().mean()),
            "loss": pytest.approx(nn.functional.cross_entropy(scores, y).item(), abs=1e-6),
            "samples": size,
            "sum": pytest.approx(x.double().sum().item()),
            "first_class": int((y == 0).sum()),
            "entries": size + int(y.sum()),
        }


class Most(DatasetEvaluator):
    """The size of the largest batch. As in detectron2, the first rank has the results."""

    def reset(self):
        self.most = 0

    def process(self, inputs, outputs):
        self.most = max(self.most, len(inputs[0]))

    def evaluate(self):
        return {"seen": {"most": max(parts)}} if (parts := comm.gather(self.most)) else None


class Steps(TrainerBase):
    def run_step(self):
        torch.distributed.all_reduce(torch.ones(1))


class OfOneRank:
    """A metric that forgets the other ranks."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.samples = 0

    def update(self, preds, target):
        self.samples += len(target)

    def compute(self):
        return self.samples


def check_a_metric_of_one_rank_is_a_warning(folder):
    cfg = evaluation("synthetic", 7)
    cfg.TEST.METRICS = ["Accuracy", "together:OfOneRank"]
    logging.disable(logging.NOTSET)
    handler = BufferingHandler(100)
    logging.getLogger("hookline").addHandler(handler)
    DefaultTrainer.test(cfg, DefaultTrainer.build_model(cfg))
    logging.getLogger("hookline").removeHandler(handler)
    logging.disable(logging.WARNING)
    (warning,) = [record.getMessage() for record in handler.buffer if record.levelno == logging.WARNING]
    assert warning.startswith("The metric synthetic/of_one_rank is not that of all samples: it is 4, 3 on the ranks.")


def check_results_that_rank_0_alone_returns_are_those_of_all(folder):
    cfg = evaluation("synthetic", 7)
    trainer = DefaultTrainer(cfg)
    trainer.test = lambda cfg, model: {"synthetic": {"accuracy": 0.5}} if comm.is_main_process() else {}
    assert trainer.evaluate() == {"synthetic": {"accuracy": 0.5}}
    # As --eval-only does.
    cfg.TEST.EXPECTED_RESULTS = [["seen", "most", 2, 0]]
    results = DefaultTrainer.test(cfg, trainer.model, Most())
    assert (list(results), verify_results(cfg, results)) == (["seen"], True)
    simple, seen = Steps(), []
    evaluate = EvalHook(2, lambda: {"accuracy": 0.25} if comm.is_main_process() else {})
    simple.register_hooks([evaluate, EarlyStopping("accuracy"), CallbackHook(after_eval=lambda t, r: seen.append(r))])
    simple.train(0, 4)
    assert seen == [{"accuracy": 0.25}] * 2


# ---------------------------------------------------------------------- predictions


def check_uneven_shares_are_predicted_once_and_in_order(folder):
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    strategy = FSDP2(min_params=1)
    sharded = strategy.wrap(nn.Sequential(nn.Linear(3, 2)), CPU)
    with torch.no_grad():
        expected = {model: model(torch.eye(7, 3)) for model in (plain, sharded)}
    for size, model, format in ((7, plain, "npz"), (3, plain, "jsonl"), (7, sharded, "jsonl"), (1, sharded, "jsonl")):
        data = TensorDataset(torch.eye(7, 3)[:size])
        loader = DataLoader(data, batch_sampler=BatchSampler(InferenceSampler(size), 2, drop_last=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = SimpleTrainer(model, [torch.eye(1, 3)], optimizer, strategy=strategy if model is sharded else None)
        outputs = trainer.predict(loader, predict=lambda model, batch: model(batch[0]))
        path = folder / f"{format}{size}" / f"predictions.{format}"
        count = write_predictions(outputs, str(path))
        comm.synchronize()
        if format == "npz":
            with np.load(path) as arrays:
                found = arrays["prediction"]
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            assert [row["index"] for row in rows] == list(range(size))
            found = [row["prediction"] for row in rows]
        assert count == size
        torch.testing.assert_close(torch.tensor(found), expected[model][:size])
        assert not list((folder / f"{format}{size}").glob(".hookline-*"))


def check_in_one_call_ranks_share_the_data_and_all_have_all_predictions(folder):
    trainer = trainer_of(folder, points(20), points(7, 1), batch_size=4)
    accuracy = trainer.train().metrics["test/accuracy"]
    found = trainer.predict(targets=True, metrics=True)
    assert found.targets.tolist() == points(7, 1).tensors[1].tolist()
    assert (
        accuracy
        == found.metrics["accuracy"]
        == pytest.approx((found.outputs.argmax(1) == found.targets).double().mean())
    )
    assert comm.all_gather(found.outputs.tolist()) == [found.outputs.tolist()] * 2
    assert comm.all_reduce_sum(sum(len(batch) for batch in trainer.predict(stream=True))) == 7
    assert (folder / "run/log.txt.rank1").exists()
    with pytest.raises(ConfigError, match="a DataLoader gives each of 2 ranks all samples"):
        trainer_of(folder, DataLoader(points(20), 4), None, metrics=[])
