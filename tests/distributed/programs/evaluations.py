"""Evaluations of 1 and 7 samples. With 1 sample, one of two ranks has none."""

import logging

import torch
from results import write_result

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, TrainerBase, comm
from hookline.engine.data import DATASET_REGISTRY, ShardedIterable, build_test_loader
from hookline.engine.evaluation import DatasetEvaluator, inference_on_dataset, verify_results
from hookline.hooks import CallbackHook, EarlyStopping, EvalHook


class Steps(TrainerBase):
    def run_step(self):
        torch.distributed.all_reduce(torch.ones(1))


@DATASET_REGISTRY.register()
def stream(size: int = 7):
    dataset = DATASET_REGISTRY.build("synthetic", {"size": size, "seed": 1})
    return ShardedIterable([dataset[index] for index in range(size)])


class Seen(DatasetEvaluator):
    """Collects the samples of all ranks and the size of the largest batch."""

    def reset(self):
        self.samples, self.most = [], 0

    def process(self, inputs, outputs):
        self.samples += [round(float(row.sum()), 5) for row in inputs[0]]
        self.most = max(self.most, len(inputs[0]))

    def evaluate(self):
        parts = comm.gather((self.samples, self.most))
        if not parts:
            return None  # detectron2's way: the first rank has the results
        samples = [sample for part, _ in parts for sample in part]
        return {"seen": {"samples": sorted(samples), "most": max(most for _, most in parts)}}


def of_all(predictions, targets, inputs):
    """A metric that is called with all samples."""
    return {"samples": len(predictions), "shape": inputs.shape[1], "first_class": int((targets == 0).sum())}


METRICS = [
    "Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}}, "Loss", "evaluations:of_all",
    {"NAME": "torchmetrics:ConfusionMatrix", "ARGS": {"task": "multiclass", "num_classes": 4}},
]  # fmt: skip


def config(name, size):
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "MODEL.DEVICE", "cpu",
        "MODEL.LOSS.NAME", "CrossEntropyLoss", "DATASETS.TRAIN", ["synthetic"], "TEST.METRICS", METRICS,
        "DATASETS.TEST", [{"NAME": name, "ARGS": {"size": size}}], "DATALOADER.TEST_BATCH_SIZE", 2,
        "OUTPUT_DIR", "unused", "SEED", 1,
    ])  # fmt: skip
    return cfg


def main(folder):
    """Evaluations of data sets of each kind and size, and the samples that they read."""
    logging.disable(logging.CRITICAL)
    results = {}
    for name in ("synthetic", "stream"):
        for size in (1, 7):
            cfg = config(name, size)
            torch.manual_seed(0)
            model = DefaultTrainer.build_model(cfg)
            found = DefaultTrainer.test(cfg, model)[name]
            seen = inference_on_dataset(model, build_test_loader(cfg, name), Seen(), predict=lambda m, b: m(b[0]))
            results[f"{name} {size}"] = [found, seen.get("seen")]
    if comm.get_world_size() > 1:
        decisions()
    write_result(folder, results)


def decisions():
    """Check that decisions that depend on results are the same on all ranks, whichever rank returned them."""
    cfg = config("synthetic", 7)
    trainer = DefaultTrainer(cfg)
    trainer.test = lambda cfg, model: {"synthetic": {"accuracy": 0.5}} if comm.is_main_process() else {}
    assert trainer.evaluate() == {"synthetic": {"accuracy": 0.5}}
    # As --eval-only does.
    cfg.TEST.EXPECTED_RESULTS = [["seen", "most", 2, 0]]
    seen = DefaultTrainer.test(cfg, trainer.model, Seen())
    assert (list(seen), verify_results(cfg, seen)) == (["seen"], True)
    # A user's function that returns results on rank 0 only, also at the end of a run.
    seen = []
    simple = Steps()
    evaluate = EvalHook(2, lambda: {"accuracy": 0.25} if comm.is_main_process() else {})
    simple.register_hooks([evaluate, EarlyStopping("accuracy"), CallbackHook(after_eval=lambda t, r: seen.append(r))])
    simple.train(0, 4)
    assert seen == [{"accuracy": 0.25}] * 2
