"""``ConfusionMatrix``."""

import pytest
import torch
from small_runs import config_trainer

from hookline.config import ConfigError, get_cfg
from hookline.engine.evaluation import build_evaluator

pytest.importorskip("matplotlib")

EVALUATOR = {"NAME": "ConfusionMatrix", "ARGS": {"class_names": ["cat", "dog", "owl"]}}


def evaluator(folder, **keys):
    cfg = get_cfg()
    cfg.merge_from_list(["TEST.METRICS", ["Accuracy"], "OUTPUT_DIR", str(folder)])
    cfg.TEST.EVALUATOR.merge_from_list(["NAME", EVALUATOR["NAME"], "ARGS", keys or EVALUATOR["ARGS"]])
    return build_evaluator(cfg, "pets")


def scores(*classes):
    return torch.eye(3)[list(classes)]


def test_predictions_are_counted_by_class(tmp_path):
    one = evaluator(tmp_path)
    one.reset()
    one.process((None, torch.tensor([0, 1, 2])), scores(0, 1, 1))
    one.process((None, torch.tensor([2, -100])), scores(2, 0))  # -100 is not counted
    assert one.evaluate() == {"pets": {"accuracy": pytest.approx(3 / 4)}}
    assert one.matrix.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    table = (tmp_path / "inference/pets/confusion_matrix.csv").read_text()
    assert table == "target,cat,dog,owl\ncat,1,0,0\ndog,0,1,0\nowl,0,1,1\n"
    assert (tmp_path / "inference/pets/confusion_matrix.png").read_bytes().startswith(b"\x89PNG")
    one.reset()
    one.process((None, torch.tensor([0])), scores(0))
    one.evaluate()
    assert one.matrix.sum() == 1


def test_scores_and_names_of_another_number_of_classes(tmp_path):
    with pytest.raises(ConfigError, match="class_names: has 2 names, but the model has 3 classes"):
        evaluator(tmp_path, class_names=["a", "b"]).process((None, torch.tensor([0])), scores(0))
    one = evaluator(tmp_path, class_names=[])
    one.metrics.clear()
    with pytest.raises(ValueError, match=r"needs scores \(N, C, ...\) for targets"):
        one.process((None, torch.tensor([0])), torch.tensor([1]))


def test_each_evaluation_of_a_run_puts_the_picture(tmp_path):
    own = ["TEST.EVALUATOR.NAME", "ConfusionMatrix", "SOLVER.MAX_ITER", 4, "TEST.EVAL_PERIOD", 2]
    trainer = config_trainer(tmp_path, *own)
    trainer.train()
    images = trainer.storage.images()
    assert [(iteration, name) for iteration, name, _ in images] == [
        (1, "synthetic/confusion_matrix"),
        (4, "synthetic/confusion_matrix"),
    ]
    assert images[0][2].shape[0] == 3
    assert images[0][2].dtype == torch.uint8
    table = (tmp_path / "inference/synthetic/confusion_matrix.csv").read_text().splitlines()
    assert sum(int(cell) for line in table[1:] for cell in line.split(",")[1:]) == 40


def test_a_trial_run_writes_no_picture(tmp_path):
    config_trainer(tmp_path, "TEST.EVALUATOR.NAME", "ConfusionMatrix", "FAST_DEV_RUN", 1).train()
    assert not (tmp_path / "inference").exists()
