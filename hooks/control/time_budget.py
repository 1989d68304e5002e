"""``TimeBudget``: a run whose length is a time."""

from typing import Any

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase

__all__ = ["TimeBudget"]

# Steps before the first estimate.
_FIRST_STEPS = 5


@HOOK_REGISTRY.register()
class TimeBudget(HookBase):
    """Completes the run when a time has been spent on training, and estimates its length in iterations until then.

    The estimate becomes ``trainer.max_iter``, so schedules, progress bar and remaining time follow it. It is made after
    5 steps, then each time that a quarter more, or 3 % of the budget, has been spent, and where an estimate from slow
    first steps would end the run too early. Evaluations and checkpoints during training count. The step that reaches
    the budget is the last one. Saves the time spent: a resumed run has the rest of the budget.

    In a config: ``SOLVER.MAX_ITER: "2h"``.

    Args:
        budget: a time, such as "2h".

    Raises:
        ConfigError: it is not a time.
    """

    single = True

    def __init__(self, budget: "Duration | int | str") -> None:
        self.budget = Duration.parse_time(budget)
        if not self.budget:
            raise ConfigError("TimeBudget: budget must be a time that is not 0; write '45s', '30min' or '2h'")
        self.reset_state()

    def reset_state(self) -> None:
        self._spent = self._before = self._next = 0.0

    def before_train(self) -> None:
        self._before = self._spent

    def after_step(self) -> None:
        trainer, budget = self.trainer, self.budget.seconds
        self._spent = spent = self._before + trainer.clock()
        done = trainer.iter + 1
        if spent >= budget:
            trainer.max_iter = done
        elif done >= _FIRST_STEPS and (spent >= self._next or done + 1 >= trainer.max_iter):
            self._next = spent + max(min(spent / 4, 0.03 * budget), 0.003 * budget)
            trainer.max_iter = max(done + 1, round(done * budget / spent))

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self._spent, "next": self._next, "budget": str(self.budget), "max_iter": self.trainer.max_iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._spent, self._next = state_dict["spent"], state_dict["next"]
        trainer, budget = self.trainer, self.budget.seconds
        done = trainer.finished_iter + 1
        if self._spent >= budget:
            trainer.max_iter = done
        elif state_dict["budget"] == str(self.budget):
            trainer.max_iter = state_dict["max_iter"]
        else:
            trainer.max_iter = max(done + 1, round(done * budget / self._spent))
