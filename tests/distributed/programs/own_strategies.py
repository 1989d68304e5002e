"""Strategies as a user writes them, of docs/distributed.md and tests/distributed/strategies: training and resume."""

import logging
import shutil
import sys

import meshes
import pytest
import torch
from parts import CLIP, ROOT, run_of, whole
from ranks import rows
from small_runs import same
from snippets import Page

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer, comm
from hookline.engine.parallel import Strategy
from hookline.hooks import HookBase
from hookline.hooks.common import gathered, unwrap_model


class DrawnSame(HookBase):
    """Checks that ranks that share a batch draw the same random numbers, for dropout."""

    def after_step(self):
        drawn = comm.all_gather(torch.rand(()).item())
        assert len(set(drawn)) == comm.get_data_size(), drawn


# Each strategy, and what its run needs besides.
STRATEGIES = {
    "tensor_parallel:TensorParallel": ["HOOKS", ["own_strategies:DrawnSame"]],
    "by_hand:ByHand": ["SOLVER.ACCUMULATION_STEPS", 2],
    "engine_step:EngineStrategy": [],
}
LEFT_OUT = ("time", "data_time", "eta_seconds", "slowest_rank", "num_items")
LOCAL_SGD = ["HOOKS", [{"NAME": "local_sgd:AverageWeights", "ARGS": {"period": 2}}], "DATALOADER.BATCH_SIZE", 62]


def trainer_of(folder, strategy, *options, resume=False):
    # With 61 samples, the shares of two ranks differ.
    given = ["MODEL.ARGS.hidden", [32, 16], "DATALOADER.BATCH_SIZE", 61, "SOLVER.MAX_ITER", 8]
    given += ["SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 4, *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 0.2]
    return run_of(folder, *given, "PARALLEL.NAME", strategy, *options, resume=resume)


def resume(folder, strategy, *options):
    """Resume a copy of a run as it was after iteration 2; return its folder and trainer."""
    copy = folder.with_name(f"{folder.name}-{strategy}")
    if comm.is_main_process():
        shutil.copytree(folder, copy)
        (copy / "last_checkpoint").write_text("model_0000002.pth")
    comm.synchronize()
    trainer = trainer_of(copy, strategy, *options, resume=True)
    assert trainer.start_iter == 3
    trainer.train()
    comm.synchronize()
    return copy, trainer


def assert_same(ours, theirs):
    for our, their in zip(rows(ours, LEFT_OUT), rows(theirs, LEFT_OUT), strict=True):
        assert our == pytest.approx(their, rel=1e-4, abs=1e-6)


def check_each_strategy_trains_as_ddp_and_resumes_exactly(folder):
    if comm.is_main_process():
        page = {snippet.file: snippet.text for snippet in Page(ROOT / "docs/distributed.md").snippets}
        (folder / "tensor_parallel.py").write_text(page["tensor_parallel.py"])
    sys.path.insert(0, str(folder))
    trainer_of(folder / "ddp", "ddp").train()
    for strategy, options in STRATEGIES.items():
        run = folder / strategy
        through = trainer_of(run, strategy, *options)
        through.train()
        comm.synchronize()
        assert_same(run, folder / "ddp")
        copy, again = resume(run, strategy, *options)
        assert same(whole(again.model.state_dict()), whole(through.model.state_dict()))
        assert rows(copy) == rows(run)
        assert not hasattr(again.strategy, "engine") or again.strategy.engine.steps == 5
        assert_same(resume(run, "ddp")[0], folder / "ddp")


def check_local_sgd_resumes_exactly_with_the_same_weights_on_all_ranks(folder):
    through = trainer_of(folder / "run", "local_sgd:LocalSGD", *LOCAL_SGD)
    through.train()
    _, again = resume(folder / "run", "local_sgd:LocalSGD", *LOCAL_SGD)
    assert same(again.model.state_dict(), through.model.state_dict())
    assert same(again.model.state_dict(), comm.broadcast_object(again.model.state_dict()))


def check_ranks_that_share_a_text_train_and_evaluate_like_ddp(folder):
    text = (ROOT / "tests/distributed/strategies/context_parallel.py").read_text()
    if comm.is_main_process():
        (folder / "context_fsdp.py").write_text(text.replace("import DDP", "import FSDP2 as DDP"))
    comm.synchronize()
    sys.path.insert(0, str(folder))
    size = {"vocab_size": 12, "block_size": 8, "width": 16, "depth": 2, "heads": 8, "kv_heads": 4}
    options = ["MODEL.NAME", "GPT", "MODEL.ARGS", repr(size), "MODEL.ACTIVATION_CHECKPOINTING", "['TransformerBlock']"]
    options += ["MODEL.ACTIVATION_CHECKPOINTING_KEEP", "['matmul', 'attention']", "SOLVER.ACCUMULATION_STEPS", "2"]
    options += ["SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.OPTIMIZER.ARGS.momentum", "0.9", "TEST.EVAL_PERIOD", "2"]
    weights = []
    for strategy in ("ddp", "context_parallel:ContextParallel", "context_fsdp:ContextParallel"):
        trainer = DefaultTrainer(meshes.config(folder / strategy, *options, "PARALLEL.NAME", strategy))
        trainer.train()
        comm.synchronize()
        weights.append({name: gathered(value) for name, value in unwrap_model(trainer.model).state_dict().items()})
        assert_same(folder / strategy, folder / "ddp")
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[-1][name], value, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- what is refused


class Undeclared(Strategy):
    """Shards the model, and does not say that its ranks share a batch."""

    def wrap(self, model, device):
        from tensor_parallel import TensorParallel

        return TensorParallel().wrap(model, device)


class EachItsOwn(Strategy):
    """Each rank trains its own weights."""


def check_a_sharding_strategy_must_declare_which_ranks_share_a_batch(folder):
    with pytest.raises(ConfigError, match="Undeclared neither averages gradients nor has ranks share a batch"):
        trainer_of(folder / "run", "own_strategies:Undeclared").train()


def check_a_run_with_other_weights_on_each_rank_cannot_be_resumed(folder):
    logging.disable(logging.INFO)
    trainer_of(folder, "own_strategies:EachItsOwn").train()
    logging.disable(logging.WARNING)
    comm.synchronize()
    before = {path: path.read_bytes() for path in folder.glob("*.pth")}
    assert "Strategy EachItsOwn: each rank has its own weights" in (folder / "log.txt").read_text()
    for strategy in ("own_strategies:EachItsOwn", "ddp"):
        with pytest.raises(ConfigError, match="cannot be resumed: its run held other weights"):
            trainer_of(folder, strategy, "SOLVER.MAX_ITER", 10, resume=True)
    assert {path: path.read_bytes() for path in folder.glob("*.pth")} == before


def check_what_does_not_work_with_own_methods_is_refused(folder):
    options = "SOLVER.AMP", {"ENABLED": True, "DTYPE": "float16"}
    with pytest.raises(ConfigError, match=r"SOLVER\.AMP\.DTYPE"):
        trainer_of(folder, "engine_step:EngineStrategy", *options).train()
