"""Evaluation over ranks is that of one process: PITFALLS 33."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

# Of 1 sample one rank has none; 7 and 64 are shared out 4 to 3 and 32 to 32.
EVALUATIONS = """
import logging
from hookline.engine import DefaultTrainer
from hookline.engine.data import DATASET_REGISTRY, ShardedIterable, build_test_loader
from hookline.engine.evaluation import DatasetEvaluator, inference_on_dataset, verify_results
from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, EarlyStopping, EvalHook

class Steps(TrainerBase):
    def run_step(self):
        torch.distributed.all_reduce(torch.ones(1)) if comm.get_world_size() > 1 else None

@DATASET_REGISTRY.register()
def stream(size: int = 7):
    dataset = DATASET_REGISTRY.build("synthetic", {"size": size, "seed": 1})
    return ShardedIterable([dataset[index] for index in range(size)])

class Seen(DatasetEvaluator):
    # Which samples were given to which rank, and how many there were at once.
    def reset(self):
        self.samples, self.most = [], 0
    def process(self, inputs, outputs):
        self.samples += [round(float(row.sum()), 5) for row in inputs[0]]
        self.most = max(self.most, len(inputs[0]))
    def evaluate(self):
        parts = comm.gather((self.samples, self.most))
        if not parts:
            return None  # detectron2's way: the first rank has the results
        samples = sum((part for part, _ in parts), [])
        return {"seen": {"samples": sorted(samples), "most": max(most for _, most in parts)}}

def config(name, size):
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "MODEL.DEVICE", "cpu",
        "MODEL.LOSS.NAME", "CrossEntropyLoss", "DATASETS.TRAIN", ["synthetic"],
        "DATASETS.TEST", [{"NAME": name, "ARGS": {"size": size}}], "DATALOADER.TEST_BATCH_SIZE", 2,
        "TEST.METRICS", ["Accuracy", {"NAME": "Accuracy", "ARGS": {"top_k": 2}}, "Loss",
                         {"NAME": "torchmetrics:ConfusionMatrix", "ARGS": {"task": "multiclass", "num_classes": 4}}],
        "OUTPUT_DIR", "unused", "SEED", 1,
    ])
    return cfg

def main(folder):
    logging.disable(logging.CRITICAL)
    results = {}
    for name in ("synthetic", "stream"):
        for size in (1, 7, 64):
            cfg = config(name, size)
            torch.manual_seed(0)
            model = DefaultTrainer.build_model(cfg)
            results[f"{name} {size}"] = DefaultTrainer.test(cfg, model)[name]
            seen = inference_on_dataset(model, build_test_loader(cfg, name), Seen(), predict=lambda m, b: m(b[0]))
            results[f"{name} {size} seen"] = seen.get("seen")
    cfg = config("synthetic", 7)
    trainer = DefaultTrainer(cfg)
    # What is decided by results is decided on all ranks, wherever they were returned.
    trainer.test = lambda cfg, model: {"synthetic": {"accuracy": 0.5}} if comm.is_main_process() else {}
    results["on all ranks"] = trainer.evaluate()
    # What --eval-only does.
    cfg.TEST.EXPECTED_RESULTS = [["seen", "most", 2, 0]]
    seen = DefaultTrainer.test(cfg, trainer.model, Seen())
    results["met"] = [list(seen), verify_results(cfg, seen)]
    # A user's function that returns results on the first rank, at the end of a run too.
    seen = []
    simple = Steps()
    evaluate = EvalHook(2, lambda: {"accuracy": 0.25} if comm.is_main_process() else {})
    simple.register_hooks([evaluate, EarlyStopping("accuracy"), CallbackHook(after_eval=lambda t, r: seen.append(r))])
    simple.train(0, 4)
    results["hooks"] = seen
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory):
    results = []
    for ranks in (1, 2):
        code, output, found = run_ranks(EVALUATIONS, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
        assert code == 0, output
        results += found
    return results


@pytest.mark.parametrize("data", ["synthetic", "stream"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_metrics_are_those_of_one_process_on_every_rank(evaluations, data, size):
    alone, first, second = (results[f"{data} {size}"] for results in evaluations)
    assert set(alone) == {"accuracy", "accuracy_top2", "loss", "multiclass_confusion_matrix"}
    assert first == second
    for name in ("accuracy", "accuracy_top2", "multiclass_confusion_matrix"):
        assert first[name] == alone[name]
    assert first["loss"] == pytest.approx(alone["loss"], abs=1e-6)


@pytest.mark.parametrize("data", ["synthetic", "stream"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_sample_is_seen_once_and_no_more_than_a_batch_at_a_time(evaluations, data, size):
    alone, first, second = (results[f"{data} {size} seen"] for results in evaluations)
    assert len(first["samples"]) == size
    assert first["samples"] == alone["samples"]
    assert first["most"] <= 2
    assert second is None


def test_results_of_the_first_rank_are_given_to_all(evaluations):
    assert [results["on all ranks"] for results in evaluations] == [{"synthetic": {"accuracy": 0.5}}] * 3


def test_expected_results_are_met_on_all_ranks_if_the_evaluator_reports_on_the_first(evaluations):
    assert [results["met"] for results in evaluations] == [[["seen"], True]] * 3


def test_hooks_of_all_ranks_get_the_results_that_an_eval_function_returns_on_the_first(evaluations):
    assert [results["hooks"] for results in evaluations] == [[{"accuracy": 0.25}] * 2] * 3
