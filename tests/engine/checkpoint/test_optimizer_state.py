import pytest
import torch
from small_runs import config_trainer

from hookline.config import ConfigError


def new_run(tmp_path, *options):
    weights = ("MODEL.WEIGHTS", str(tmp_path / "first" / "model_final.pth"), "MODEL.WEIGHTS_OPTIMIZER", True)
    return config_trainer(tmp_path / "second", "SOLVER.MAX_ITER", 3, *weights, *options)


@pytest.fixture
def first(tmp_path):
    trainer = config_trainer(tmp_path / "first", "SOLVER.MAX_ITER", 5, "SOLVER.OPTIMIZER.NAME", "AdamW")
    trainer.train()
    return trainer


def test_a_new_run_starts_with_weights_and_optimizer_of_another(first, tmp_path):
    trainer = new_run(tmp_path, "SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.BASE_LR", 0.025)
    assert (trainer.start_iter, trainer.epoch) == (0, 0)
    own, other = trainer.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"]
    assert own.keys() == other.keys()
    assert all(torch.equal(own[0][name], other[0][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), first.model.parameters(), strict=True))
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.025}
    assert trainer.train().iteration == 3


def test_weights_without_a_state_of_the_optimizer_are_refused(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(first.model.state_dict(), "weights.pth")
    with pytest.raises(ConfigError, match="no state of an optimizer"):
        new_run(tmp_path, "MODEL.WEIGHTS", "weights.pth")
