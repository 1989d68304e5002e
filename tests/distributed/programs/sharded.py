"""Sharded checkpoints: training, saving, and faults while saving."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, comm
from hookline.engine.checkpoint import CheckpointError, files, sharded, sharded_checkpointer
from hookline.engine.parallel.fsdp import FSDP2
from hookline.engine.solver import build_grad_clipper
from hookline.hooks import CallbackHook, HookBase

files.RETRY_AFTER = 0.0


def trainer(folder, name, *options, resume=False):
    cfg = get_cfg()
    cfg.merge_from_file(str(Path(__file__).parents[3] / "configs/synthetic/mlp.yaml"))
    given = [
        "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / name), "SEED", "3", "PARALLEL.NAME", "fsdp2",
        "PARALLEL.ARGS.min_params", "100", "SOLVER.MAX_ITER", "12", "SOLVER.CHECKPOINT_PERIOD", "3",
        "TEST.EVAL_PERIOD", "3", "LOG.PERIOD", "1",
    ]  # fmt: skip
    cfg.merge_from_list([*given, *options])
    torch.manual_seed(3 + comm.get_rank())
    made = DefaultTrainer(cfg)
    made.resume_or_load(resume=resume)
    return made


def whole(state):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def prefixed(folder, weights, model):
    if comm.is_main_process():
        torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "prefixed.pth")
    return folder / "prefixed.pth"


def hugging_face(folder, weights, model):
    from safetensors.torch import save_file

    there = folder / "hugging_face"
    if comm.is_main_process():
        there.mkdir()
        for name, value in weights.items():
            save_file({name: value.contiguous()}, there / f"{name}.safetensors")
        places = {name: f"{name}.safetensors" for name in weights}
        (there / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return there


def dcp_folder(folder, weights, model):
    sharded.dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=False)
    return folder / "dcp"


class Nan(HookBase):
    def after_fetch(self, batch):
        if self.trainer.iter == 5 and comm.get_rank() == 1:
            batch[0][0] = float("nan")


class NanShard(HookBase):
    """A gradient that is NaN in rank 1's shard only."""

    def after_backward(self):
        if self.trainer.iter == 6 and comm.get_rank() == 1:
            next(self.trainer.model.parameters()).grad.to_local().fill_(float("nan"))


OPTIONS = [
    "CHECKPOINT.ASYNC", "True", "CHECKPOINT.MAX_TO_KEEP", "1", "CHECKPOINT.BEST.KEEP", "2",
    "CHECKPOINT.LOAD_BEST_AT_END", "True", "HOOKS", "[{'NAME': 'EMA', 'ARGS': {'decay': 0.5}}]",
]  # fmt: skip
SHORT = ["SOLVER.MAX_ITER", "6", "DATASETS.TEST", "()"]
CLIP = ["SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"]


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def is_finite(trained):
    return all(bool(weight.isfinite().all()) for weight in whole(trained.model.state_dict()).values())


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("*.pth*"))


# ---------------------------------------------------------------------- training


def check_an_interrupted_run_with_ema_and_asynchronous_saves_resumes_to_identical_weights(folder):
    through = trainer(folder, "through", *OPTIONS)
    through.train()
    stopped = trainer(folder, "stopped", *OPTIONS)
    stopped.register_hooks([CallbackHook(after_step=lambda t: t.iter == 7 and t.request_stop("enough", exit_code=75))])
    stopped.train()
    assert checkpoints(folder / "stopped")[0] == "model_0000007.pth"  # older ones are removed
    again = trainer(folder, "stopped", *OPTIONS, resume=True)
    assert again.start_iter == 8
    again.train()
    assert equal(whole(again.model.state_dict()), whole(through.model.state_dict()))
    ours, theirs = (whole(one.find_hook("EMA").state_dict()["averaged_model"]) for one in (again, through))
    assert equal(ours, theirs)
    left = checkpoints(folder / "through")
    assert [name for name in left if "best" not in name] == ["model_0000011.pth", "model_final.pth"]
    assert len(left) == 5  # the best has two names
    assert not list((folder / "through").glob(".hookline-*"))


def check_all_ranks_handle_a_nan_of_one_rank_and_do_not_save_it(folder):
    skipping = trainer(folder, "skip", "SOLVER.NONFINITE_LOSS", "skip", *SHORT)
    skipping.register_hooks([Nan()])
    skipping.train()
    assert (skipping.nonfinite.steps, is_finite(skipping)) == (1, True)
    raising = trainer(folder, "raise")
    raising.register_hooks([Nan()])
    with pytest.raises(FloatingPointError, match="on rank 1 the loss is NaN or infinite at iteration 5"):
        raising.train()
    alone = trainer(folder, "alone", *CLIP, "LOG.PERIOD", "20")
    alone.register_hooks([NanShard()])
    with pytest.raises(FloatingPointError, match=r"on rank 1 the gradient of 1\.weight is NaN .* at iteration 6"):
        alone.train()
    assert is_finite(alone)
    saved = [name for name in checkpoints(folder / "alone") if "best" not in name]
    assert saved == ["model_0000002.pth", "model_0000005.pth"]


def check_a_loss_scale_accumulation_and_clipping_work_together(folder):
    amp = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16", "SOLVER.ACCUMULATION_STEPS", "2"]
    scaled = trainer(folder, "scaled", *amp, *CLIP, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.1", *SHORT)
    scaled.train()
    found = (scaled.grad_scaler.get_scale(), scaled.storage.latest()["grad_norm"][0])
    assert min(found) > 0
    assert comm.all_gather(found) == [found] * 2


def check_the_best_checkpoints_are_chosen_by_the_mean_loss_over_ranks(folder):
    best = ["CHECKPOINT.BEST.METRIC", "total_loss", "CHECKPOINT.BEST.MODE", "min", "CHECKPOINT.BEST.PERIOD", "1"]
    chosen = trainer(folder, "run", *best, "CHECKPOINT.BEST.KEEP", "2", *SHORT)
    chosen.train()
    rows = [json.loads(row) for row in (folder / "run/metrics.json").read_text().splitlines()]
    losses = sorted([row["total_loss"], row["iteration"]] for row in rows if "total_loss" in row)
    assert chosen.find_hook("BestCheckpointer").best == [pytest.approx(row) for row in losses[:2]]
    state = torch.load(folder / "run/model_best.pth/state.pth", weights_only=True)
    assert [state["best_metric"]["value"], state["iteration"]] == pytest.approx(losses[0])


# ---------------------------------------------------------------------- saving


def saved_run(folder):
    """Return a trainer that has saved "old.pth", its folder and its whole weights."""
    made = trainer(folder, "run", "CHECKPOINT.ASYNC", "True")
    made.checkpointer.save("old")
    made.checkpointer.wait()
    return made, folder / "run", whole(made.model.state_dict())


def change(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def check_an_asynchronous_save_has_the_state_of_its_call_and_becomes_the_last_when_complete(folder):
    made, run, before = saved_run(folder)
    keeper = made.checkpointer
    gate, write = threading.Event(), sharded_checkpointer.write_folder
    sharded_checkpointer.write_folder = lambda *args: gate.wait(60) and write(*args)
    keeper.save("new")
    change(keeper.model, 1.0)  # while the write waits
    assert (run / "last_checkpoint").read_text() == "old.pth"
    comm.synchronize()
    gate.set()
    keeper.wait()
    comm.synchronize()
    sharded_checkpointer.write_folder = write
    assert (run / "last_checkpoint").read_text() == "new.pth"
    assert equal(whole(keeper._load_file(str(run / "new.pth"))["model"]), before)
    sizes = [(run / f"new.pth/__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.75 * sum(sizes)  # each rank writes only its share


def check_a_rank_loads_only_its_shards_from_each_kind_of_file(folder):
    made, run, before = saved_run(folder)
    keeper = made.checkpointer
    if comm.is_main_process():
        torch.save({"model": before}, folder / "file.pth")
    comm.synchronize()
    size = sum(value.nbytes for value in before.values())
    for path in (run / "old.pth", folder / "file.pth"):
        part = keeper._load_file(str(path))["model"]
        held = comm.all_gather(sum(value.to_local().untyped_storage().nbytes() for value in part.values()))
        assert sum(held) == size
        assert max(held) < 0.7 * size
    optimizer = keeper._load_file(str(run / "old.pth"), mmap=True)["trainer"]["optimizer"]["state"]
    assert not any(hasattr(value, "to_local") for state in optimizer.values() for value in state.values())  # not read
    for path_of in (prefixed, hugging_face, dcp_folder):
        place = path_of(folder, before, keeper.model)
        comm.synchronize()
        change(keeper.model, 0.0)
        keeper.load(str(place), checkpointables=[])
        assert equal(whole(keeper.model.state_dict()), before), place
        read = keeper._load_file(str(place), mmap=True)["model"].values()
        assert path_of is prefixed or all(hasattr(value, "to_local") for value in read), place


def check_a_disk_error_on_one_rank_fails_on_all_and_keeps_the_previous_checkpoint(folder):
    made, run, _ = saved_run(folder)
    keeper = made.checkpointer
    writer = sharded.dcp.FileSystemWriter
    write, failures, errors, allowed = writer.write_data, [], [], 1

    def failing(*args):
        if comm.get_rank() == 1 and len(failures) < allowed:
            failures.append(1)
            raise OSError(28, "No space left on device")
        return write(*args)

    writer.write_data = failing
    keeper.save("twice")  # the second attempt succeeds
    keeper.wait()
    assert (run / "last_checkpoint").read_text() == "twice.pth"
    allowed = 99
    keeper.save("never", then=errors.append)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        keeper.wait()
    keeper._saver.on_error = "continue"
    keeper.save("again", then=errors.append)
    keeper.wait()
    writer.write_data = write
    assert "No space left on device" in str(errors[1])
    assert str(errors[0]) == str(caught.value)
    assert comm.get_rank() or "on rank 1: No space" in str(caught.value)
    comm.synchronize()  # rank 0 removes what was written
    assert (run / "last_checkpoint").read_text() == "twice.pth"
    assert checkpoints(run) == ["old.pth", "twice.pth"]


def check_gradients_are_clipped_as_those_of_the_whole_model_and_running_means_are_equal(folder):
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))

    batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    strategy, cfg = FSDP2(min_params=1), get_cfg()
    for kind, limit in (("norm", 1e-3), ("param_norm", 1e-3), ("value", 1e-4)):
        for norm_type in (2.0, float("inf")):
            clip = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": limit, "NORM_TYPE": norm_type}
            cfg.merge_from_list(["SOLVER.CLIP_GRADIENTS", clip])
            clip = build_grad_clipper(cfg)
            alone, shared = layers(), strategy.wrap(layers(), torch.device("cpu"))
            for model in (alone, shared):
                model(batch).square().sum().backward()
            expected, found = clip(list(alone.parameters())), strategy.clip(clip, list(shared.parameters()))
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected)
            for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    norms = strategy.wrap(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), torch.device("cpu"))
    norms(batch + comm.get_rank())
    strategy.before_evaluation(norms)
    first, second = comm.all_gather(norms[1].running_mean.tolist())
    assert first == second


# ---------------------------------------------------------------------- faults


def killed(folder, rank, where, asynchronous):
    one = trainer(folder, "run", "CHECKPOINT.ASYNC", asynchronous)
    one.checkpointer.save("model_0000000", iteration=0)
    one.checkpointer.wait()
    comm.synchronize()
    place = sharded if where != "rename" else sharded.os
    whole = getattr(place, where)

    def killed(*args, **kwargs):
        if comm.get_rank() == int(rank) and ".hookline-tmp-" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    setattr(place, where, killed)
    one.checkpointer.save("model_0000001", iteration=1)
    one.checkpointer.wait()


class Fail(HookBase):
    def before_step(self):
        if self.trainer.iter == 5 and comm.get_rank() == 1:
            raise ValueError("the reason")


def failing(folder):
    one = trainer(folder, "run", "CHECKPOINT.ON_EXCEPTION", "True", "CHECKPOINT.ASYNC", "True")
    one.register_hooks([Fail()])
    one.train()
