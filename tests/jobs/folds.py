"""Search a learning rate with Optuna: three folds a trial, and trials that fall behind are pruned."""

import optuna
from given import table
from sklearn.model_selection import KFold
from torch import nn

from hookline import Trainer

x, y = table(300)


def objective(trial):
    lr, total = trial.suggest_float("lr", 1e-3, 1.0, log=True), 0.0
    for fold, (train, test) in enumerate(KFold(3, shuffle=True, random_state=0).split(x)):
        trainer = Trainer(
            lambda: nn.Linear(4, 3), (x[train], y[train]), (x[test], y[test]), loss=nn.CrossEntropyLoss(), lr=lr,
            metrics=["Accuracy"], length="2ep", seed=1, output_dir=f"output/folds/{trial.number}_{fold}",
        )  # fmt: skip
        total += trainer.train().metrics["test/accuracy"]
        trial.report(total / (fold + 1), fold)
        if trial.should_prune():
            raise optuna.TrialPruned
    return total / 3


study = optuna.create_study(direction="maximize")
study.optimize(objective, n_trials=4)
