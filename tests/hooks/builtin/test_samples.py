"""``SamplePredictions``."""

import pytest
import torch
from small_runs import config_trainer

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
