"""``SamplePredictions``."""

import pytest
import torch
from small_runs import Net, config_trainer

from hookline.engine import SimpleTrainer
from hookline.engine.evaluation import evaluation_context, inference_on_dataset
from hookline.hooks import EvalHook, SamplePredictions

pytest.importorskip("matplotlib")


def test_each_evaluation_writes_a_picture_of_the_first_samples(tmp_path):
    hooks = [{"NAME": "SamplePredictions", "ARGS": {"num": 11, "class_names": ["a", "b", "c", "d"]}}]
    trainer = config_trainer(tmp_path, "HOOKS", hooks, "SOLVER.MAX_ITER", 4, "TEST.EVAL_PERIOD", 2)
    seen = []
    hook = trainer.find_hook("SamplePredictions")
    after_eval = hook.after_eval
    hook.after_eval = lambda results: (seen.append(list(hook._samples)), after_eval(results))
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["iter_0000002.png", "iter_0000004.png"]
    assert [(i, name) for i, name, _ in trainer.storage.images()] == [(1, "samples"), (4, "samples")]
    picture = trainer.storage.images()[0][2]
    assert picture[:, :, -1].float().std() == 0  # the margin
    assert picture.float().std() > 20  # the images
    samples = seen[-1]
    assert len(samples) == 11
    images, labels, correct = zip(*samples, strict=True)
    assert images[0].shape == (4, 4)
    assert all(
        (("\nis " in label) is not right) and label[0] in "abcd" for label, right in zip(labels, correct, strict=True)
    )


def test_batches_without_images_are_warned_of_once(tmp_path, log):
    model = Net(2, 3)
    trainer = SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), 0.1))

    def evaluate():
        with evaluation_context(trainer.emit):
            return inference_on_dataset(model.fc, [torch.ones(1, 2)] * 2, None)

    trainer.register_hooks([SamplePredictions(output_dir=str(tmp_path)), EvalHook(1, evaluate)])
    trainer.train(0, 2)
    assert [record.message for record in log.records].count(
        "SamplePredictions: needs images (N, 1 or 3, H, W) and class scores (N, C); nothing drawn"
    ) == 1
    assert not list(tmp_path.iterdir())
