"""``SamplePredictions``."""

import pytest
import torch
from small_runs import config_trainer
from torch import nn

from hookline import Trainer
from hookline.hooks import AutogradProfiler, SamplePredictions, TorchProfiler

pytest.importorskip("PIL")


def test_each_evaluation_writes_a_picture_of_one_sample_of_each_class(tmp_path):
    hooks = [{"NAME": "SamplePredictions", "ARGS": {"class_names": ["a", "b", "c", "d"]}}]
    trainer = config_trainer(tmp_path, "HOOKS", hooks, "SOLVER.MAX_ITER", 4, "TEST.EVAL_PERIOD", 2)
    seen = []
    hook = trainer.find_hook("SamplePredictions")
    after_eval = hook.after_eval
    hook.after_eval = lambda results: (seen.append(dict(hook._samples)), after_eval(results))
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["iter_0000002.png", "iter_0000004.png"]
    assert [(i, name) for name, _, i in trainer.storage._vis_data] == [(1, "samples"), (4, "samples")]
    picture = trainer.storage._vis_data[0][1]
    assert (picture.shape, picture.dtype) == ((3, 144, 4 * 112), torch.uint8)
    assert picture[:, :, -1].float().std() == 0  # the margin
    assert picture.float().std() > 20  # the images
    assert sorted(seen[-1]) == [0, 1, 2, 3]
    for truth, (image, label, right) in seen[-1].items():
        assert image.shape == (1, 4, 4)
        assert label[0] in "abcd"
        assert label.endswith(f"is {'abcd'[truth]}") is not right


def test_hook_objects_write_into_the_runs_folder_as_named_ones_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = torch.rand(8, 1, 4, 4), torch.arange(8) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    hooks = [SamplePredictions(num=2), TorchProfiler(start=0, steps=1), AutogradProfiler(start=1, steps=1)]
    options = {"loss": nn.CrossEntropyLoss(), "hooks": hooks, "batch_size": 4, "length": 2, "output_dir": "run"}
    Trainer(model, data, data, **options).train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    written = {"samples/iter_0000002.png", "profiler-tensorboard-iter0", "autograd-trace-iter1.json"}
    assert all((tmp_path / "run" / name).exists() for name in written)
