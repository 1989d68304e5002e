import pytest
import torch
from small_runs import config_trainer, same

from hookline.config import ConfigError


def test_a_new_run_starts_with_weights_and_optimizer_of_another(tmp_path):
    def new_run(weights):
        keys = ("MODEL.WEIGHTS", str(weights), "MODEL.WEIGHTS_OPTIMIZER", True, "SOLVER.BASE_LR", 0.025)
        return config_trainer(tmp_path / "second", "SOLVER.MAX_ITER", 3, "SOLVER.OPTIMIZER.NAME", "AdamW", *keys)

    first = config_trainer(tmp_path / "first", "SOLVER.MAX_ITER", 5, "SOLVER.OPTIMIZER.NAME", "AdamW")
    first.train()
    trainer = new_run(tmp_path / "first/model_final.pth")
    assert (trainer.start_iter, trainer.epoch) == (0, 0)
    own, other = trainer.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"]
    assert own.keys() == other.keys()
    assert all(torch.equal(own[0][name], other[0][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert same(trainer.model, first.model)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.025}
    assert trainer.train().iteration == 3
    torch.save(first.model.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match="no state of an optimizer"):
        new_run(tmp_path / "weights.pth")
