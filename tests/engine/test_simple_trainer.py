import pytest
import torch
from small_runs import Net
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, comm


def make(**options):
    model = Net()
    return SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_modules_among_the_attributes_are_moved_to_the_device():
    trainer = make(device="meta")
    trainer.metric, trainer.model = nn.Linear(1, 1), trainer.model.to("meta")
    with pytest.raises(RuntimeError):  # losses on the meta device have no values
        trainer.train(0, 1)
    assert trainer.metric.weight.is_meta


def test_gather_and_print_of_one_process(capsys, monkeypatch):
    trainer = make()
    assert torch.equal(trainer.gather(torch.tensor(2.0)), torch.tensor([2.0]))
    gathered = trainer.gather({"x": torch.ones(2, 3), "ids": ["a"]})
    assert (gathered["x"].shape, gathered["ids"]) == ((2, 3), ["a"])
    trainer.print("hello", 1, sep="-")
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    trainer.print("again")
    assert capsys.readouterr().out == "hello-1\n"


def test_the_state_of_a_trainer_of_detectron2_is_refused():
    trainer = make()
    inner = {"iteration": 4, "optimizer": trainer.optimizer.state_dict()}
    with pytest.raises(ConfigError, match=r"detectron2.*MODEL\.WEIGHTS"):
        trainer.load_state_dict({"iteration": 4, "hooks": {}, "_trainer": inner})
