"""Hooks that stop a run early."""

from collections.abc import Mapping
from typing import Any

from hookline.hooks import HookBase, StopTraining


class TargetReached(HookBase):
    """Stops training when an evaluation reaches a target, by raising ``StopTraining``."""

    def __init__(self, dataset: str, metric: str, target: float) -> None:
        self.dataset, self.metric, self.target = dataset, metric, target

    def after_eval(self, results: Mapping[str, Any]) -> None:
        if results[self.dataset][self.metric] >= self.target:
            raise StopTraining(f"{self.metric} has reached {self.target}")


class LossStalls(HookBase):
    """Stops training when the best loss is ``patience`` epochs old, by ``request_stop``.

    Saves the best loss, and its age.
    """

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.best, self.age = float("inf"), 0

    def after_epoch(self) -> None:
        steps = self.trainer.iters_per_epoch or 20
        loss = sum(self.trainer.comm.all_gather(self.trainer.storage.history("total_loss").avg(steps)))
        self.best, self.age = (loss, 0) if loss < self.best else (self.best, self.age + 1)
        if self.age >= self.patience:
            self.trainer.request_stop(f"the loss has not gone down for {self.age} epochs")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "age": self.age}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.age = state_dict["best"], state_dict["age"]
