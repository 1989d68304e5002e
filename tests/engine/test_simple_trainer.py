import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, comm
from hookline.hooks import CallbackHook, EventStorage, StopTraining


class Net(nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}


def make(**options):
    model = Net(2, 1)
    return SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_modules_among_the_attributes_are_moved_to_the_device():
    class Moved(nn.Module):
        device = None

        def to(self, device):
            self.device = device
            return self

    trainer = make(device="cpu")
    trainer.metric = Moved()
    trainer.train(0, 1)
    assert trainer.metric.device == torch.device("cpu")


def test_gather_of_one_process():
    trainer = make()
    assert torch.equal(trainer.gather(torch.tensor(2.0)), torch.tensor([2.0]))
    gathered = trainer.gather({"x": torch.ones(2, 3), "ids": ["a"]})
    assert gathered["x"].shape == (2, 3)
    assert gathered["ids"] == ["a"]


def test_print_is_that_of_rank_0(capsys, monkeypatch):
    trainer = make()
    trainer.print("hello", 1, sep="-")
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    trainer.print("again")
    assert capsys.readouterr().out == "hello-1\n"


def test_the_reason_of_a_stop_is_there_in_after_train():
    def stop(trainer):
        raise StopTraining("enough")

    seen = []
    trainer = make()
    trainer.register_hooks(
        [CallbackHook(after_step=stop, after_train=lambda trainer: seen.append(trainer.stop_reason))]
    )
    assert trainer.stop_reason == ""
    trainer.train(0, 5)
    assert seen == ["enough"]


def test_the_state_of_a_trainer_of_detectron2_is_refused():
    trainer = make()
    inner = {"iteration": 4, "optimizer": trainer.optimizer.state_dict()}
    with pytest.raises(ConfigError, match=r"saved by detectron2\?.*set MODEL\.WEIGHTS"):
        trainer.load_state_dict({"iteration": 4, "hooks": {}, "_trainer": inner})


def test_a_loop_of_its_own_serves_requests_and_begins_epochs():
    class OwnLoop(SimpleTrainer):
        def train(self):
            self.start_iter, self.max_iter = 0, 5
            with EventStorage(0) as self.storage:
                try:
                    self.before_train()
                    for self.iter in range(5):
                        self.before_step()
                        self.run_step()
                        self.after_step()
                finally:
                    self.after_train()

    model, epochs, writes = Net(2, 1), [], []
    trainer = OwnLoop(model, [torch.ones(1, 2)] * 2, torch.optim.SGD(model.parameters(), 0.1))
    events = {"before_epoch": lambda t: epochs.append(t.iter), "on_write": lambda t: writes.append(t.iter)}
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.request_write(), **events)])
    trainer.train()
    assert epochs == [0, 2, 4]
    assert writes == [0, 1, 2, 3, 4, 5]
    assert not trainer._running
