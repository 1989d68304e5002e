"""The strategies of docs/distributed.md: training, resume, evaluation. Their files are in the ranks' folder."""

import logging
import shutil
import sys
from pathlib import Path

import torch
from results import write_result

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, comm

ROOT = Path(__file__).parents[3]
# What a run needs besides its strategy. With 61 samples, the shares of two ranks differ.
OPTIONS = {
    "tensor_parallel": ["HOOKS", "['strategies:DrawnSame']"],
    "local_sgd": [
        *("HOOKS", "[{'NAME': 'local_sgd:AverageWeights', 'ARGS': {'period': 2}}]", "DATALOADER.BATCH_SIZE", 62),
        *("SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.OPTIMIZER.ARGS.momentum", 0.9),
    ],
    "by_hand": ["SOLVER.ACCUMULATION_STEPS", 2],
}


def make(folder, name, strategy, *options, resume=False):
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs/synthetic/mlp.yaml"))
    given = [
        *("MODEL.DEVICE", "cpu", "OUTPUT_DIR", folder / name, "SEED", 3),
        *("DATALOADER.BATCH_SIZE", 61, "SOLVER.MAX_ITER", 8, "SOLVER.CHECKPOINT_PERIOD", 3, "LOG.PERIOD", 1),
        *("TEST.EVAL_PERIOD", 4, "PARALLEL.NAME", strategy, "LOG.WRITERS", "['JSONWriter']"),
        *("SOLVER.CLIP_GRADIENTS", "{'ENABLED': True, 'CLIP_TYPE': 'norm', 'CLIP_VALUE': 0.2}"),
    ]
    given += ["MODEL.ARGS.hidden", "[32, 16]", *OPTIONS.get(name.split("-")[0], [])]
    cfg.merge_from_list([str(value) for value in (*given, *options)])
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer


def weights(trainer):
    state = trainer.model.state_dict()
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state.values()]


def copy(folder, name, new):
    """Copy a run as it was after iteration 2."""
    if comm.is_main_process():
        shutil.copytree(folder / name, folder / new)
        (folder / new / "last_checkpoint").write_text("model_0000002.pth")
    comm.synchronize()


def train(folder, strategies):
    """Train with each strategy, and resume on the same number of ranks."""
    sys.path.insert(0, str(folder))
    logging.disable(logging.WARNING)
    same = {}
    for strategy in strategies.split(","):
        name = strategy.partition(":")[0]
        through = make(folder, name, strategy)
        through.train()
        copy(folder, name, f"{name}-resumed")
        resumed = make(folder, f"{name}-resumed", strategy, resume=True)
        assert resumed.start_iter == 3
        resumed.train()
        same[name] = all(map(torch.equal, weights(resumed), weights(through)))
        if hasattr(resumed.strategy, "engine"):
            same["engine's steps"] = resumed.strategy.engine.steps
    write_result(folder, same)


def alone(folder, *others):
    """Train on one rank, resume the runs of several, and evaluate their last checkpoints."""
    logging.disable(logging.WARNING)
    make(folder, "alone", "auto").train()
    results = {}
    for name in others:
        if name != "local_sgd":
            copy(folder, name, f"{name}-alone")
            make(folder, f"{name}-alone", "auto", resume=True).train()
        last = make(folder, "evaluated", "auto", "MODEL.WEIGHTS", folder / name / "model_final.pth")
        results[name] = last.evaluate()["synthetic"]["accuracy"]
    write_result(folder, results)


def refusals(folder):
    """What the strategies do not work with."""
    sys.path.insert(0, str(folder))
    logging.disable(logging.CRITICAL)
    found = []
    for options in (
        ["engine_step:EngineStrategy", "SOLVER.AMP", "{'ENABLED': True, 'DTYPE': 'float16'}"],
        ["by_hand:ByHand", "SOLVER.COMPILE_STEP", True],
    ):
        try:
            make(folder, "refused", *options).train()
        except ConfigError as error:
            found.append(str(error))
    write_result(folder, found)
