"""Sharded checkpoints: training, saving, and faults while saving."""

import json
import os
import signal
import threading
from pathlib import Path

import torch
from results import write_result
from torch import nn

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, comm
from hookline.engine.checkpoint import CheckpointError, files, sharded, sharded_checkpointer
from hookline.engine.parallel.fsdp import FSDP2
from hookline.engine.solver import build_grad_clipper
from hookline.hooks import HookBase

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


class StopAt(HookBase):
    def after_step(self):
        if self.trainer.iter == 7:
            self.trainer.request_stop("enough", exit_code=75)


class Nan(HookBase):
    def after_fetch(self, batch):
        if self.trainer.iter == 5 and comm.get_rank() == 1:
            batch[0][0] = float("nan")


class NanShard(HookBase):
    """A gradient that is NaN in rank 1's shard only; counts the exchanges that are not the model's."""

    def __init__(self):
        self.exchanges = []

    def before_step(self):
        self.exchanges.append(comm.object_group()._get_sequence_number_for_group())

    def after_backward(self):
        if self.trainer.iter == 6 and comm.get_rank() == 1:
            next(self.trainer.model.parameters()).grad.to_local().fill_(float("nan"))


OPTIONS = [
    "CHECKPOINT.ASYNC", "True", "CHECKPOINT.MAX_TO_KEEP", "1", "CHECKPOINT.BEST.KEEP", "2",
    "CHECKPOINT.LOAD_BEST_AT_END", "True", "HOOKS", "[{'NAME': 'EMA', 'ARGS': {'decay': 0.5}}]",
]  # fmt: skip


def end(trained):
    ema = trained.find_hook("EMA")
    return whole(trained.model.state_dict()), whole(ema.state_dict()["averaged_model"])


def training(folder):
    result = {}
    through = trainer(folder, "through", *OPTIONS)
    through.train()
    stopped = trainer(folder, "stopped", *OPTIONS)
    stopped.register_hooks([StopAt()])
    stopped.train()
    result["stopped"] = sorted(path.name for path in (folder / "stopped").glob("*.pth"))
    again = trainer(folder, "stopped", *OPTIONS, resume=True)
    result["started"] = again.start_iter
    again.train()
    for name, ours, theirs in zip(("model", "averaged"), end(again), end(through), strict=True):
        result[name] = all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # A NaN on one rank.
    skipping = trainer(folder, "skip", "SOLVER.NONFINITE_LOSS", "skip")
    skipping.register_hooks([Nan()])
    skipping.train()
    result["skipped"] = skipping.nonfinite.steps
    result["finite"] = all(bool(w.isfinite().all()) for w in whole(skipping.model.state_dict()).values())
    raising = trainer(folder, "raise")
    raising.register_hooks([Nan()])
    try:
        raising.train()
    except FloatingPointError as error:
        result["raised"] = str(error)
    clip = ["SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm"]
    alone = trainer(folder, "alone", *clip, "LOG.PERIOD", "20")
    hook = NanShard()
    alone.register_hooks([hook])
    try:
        alone.train()
    except FloatingPointError as error:
        result["raised alone"] = str(error)
    result["left"] = all(bool(weight.isfinite().all()) for weight in whole(alone.model.state_dict()).values())
    result["saved"] = sorted(path.name for path in (folder / "alone").glob("*.pth"))
    result["exchanges"] = hook.exchanges
    # bfloat16, a loss scale, accumulation and clipping together.
    scaled = trainer(
        folder, "scaled", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16",
        "SOLVER.ACCUMULATION_STEPS", "2", "SOLVER.CLIP_GRADIENTS.ENABLED", "True",
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.1",
    )  # fmt: skip
    scaled.train()
    norm = scaled.storage.latest()["grad_norm"][0]
    result["norm"] = norm
    result["scale"] = scaled.grad_scaler.get_scale()
    write_result(folder, result)


def saving(folder):
    result = {}
    one = trainer(folder, "run", "CHECKPOINT.ASYNC", "True")
    keeper, path = one.checkpointer, folder / "run"
    last = path / "last_checkpoint"
    keeper.save("old")
    keeper.wait()
    before = whole(one.model.state_dict())
    # The weights change while the write waits.
    gate, write = threading.Event(), sharded_checkpointer.write_folder
    sharded_checkpointer.write_folder = lambda *args: gate.wait(60) and write(*args)
    keeper.save("new")
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.add_(1.0)
    result["last while it is written"] = last.read_text()
    comm.synchronize()
    gate.set()
    keeper.wait()
    comm.synchronize()
    sharded_checkpointer.write_folder = write
    result["last"] = last.read_text()
    saved = whole(keeper._load_file(str(path / "new.pth"))["model"])
    result["of the call"] = all(torch.equal(saved[name], before[name]) for name in before)

    # The bytes that a rank holds after it loaded a folder, and a file.
    if comm.is_main_process():
        torch.save({"model": before}, folder / "file.pth")
    comm.synchronize()
    for name in ("run/new.pth", "file.pth"):
        part = keeper._load_file(str(folder / name))["model"]
        result[name] = sum(value.to_local().untyped_storage().nbytes() for value in part.values())
    result["whole"] = sum(value.nbytes for value in before.values())
    weights = keeper._load_weights(str(path / "new.pth"))
    result["optimizer unread"] = [
        value
        for state in weights["trainer"]["optimizer"]["state"].values()
        for value in state.values()
        if hasattr(value, "to_local")
    ] == []

    for path_of in (prefixed, hugging_face, dcp_folder):
        place = path_of(folder, before, keeper.model)
        comm.synchronize()
        with torch.no_grad():
            for parameter in keeper.model.parameters():
                parameter.zero_()
        keeper.load(str(place), checkpointables=[])
        read = keeper._load_weights(str(place))["model"].values()
        in_shards = path_of is prefixed or all(hasattr(value, "to_local") for value in read)
        result[path_of.__name__] = in_shards and all(
            torch.equal(value, before[name]) for name, value in whole(keeper.model.state_dict()).items()
        )

    # The disk fails on one rank: while a part is written, and for last_checkpoint.
    writer = sharded.dcp.FileSystemWriter
    parts, failures = writer.write_data, []

    def failing(*args):
        if comm.get_rank() == 1 and len(failures) < allowed:
            failures.append(1)
            raise OSError(28, "No space left on device")
        return parts(*args)

    writer.write_data = failing
    allowed = 1
    keeper.save("twice")
    keeper.wait()
    result["twice"] = last.read_text()
    allowed = 99
    errors = []
    keeper.save("never", then=errors.append)
    try:
        keeper.wait()
    except CheckpointError as error:
        result["error"] = str(error)
    writer.write_data = parts
    result["reported"] = str(errors[0])
    comm.synchronize()  # rank 0 removes what was written
    result["after the error"] = [last.read_text(), sorted(p.name for p in path.glob("*.pth*"))]
    keeper._saver.on_error = "continue"
    tag = keeper.tag_last_checkpoint

    def refuse(name):
        raise OSError(13, "Permission denied")

    keeper.tag_last_checkpoint = refuse
    keeper.save("untagged", then=errors.append)
    keeper.wait()
    result["untagged"] = str(errors[1])
    keeper.tag_last_checkpoint = tag
    keeper.close()

    # Gradients are clipped as those of the whole model.
    for kind, limit in (("norm", 1e-3), ("param_norm", 1e-3), ("value", 1e-4)):
        for norm_type in (2.0, float("inf")):
            cfg = get_cfg()
            cfg.SOLVER.CLIP_GRADIENTS.ENABLED = True
            cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE, cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = kind, limit
            cfg.SOLVER.CLIP_GRADIENTS.NORM_TYPE = norm_type
            clip = build_grad_clipper(cfg)
            torch.manual_seed(0)
            alone = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
            strategy, shared = FSDP2(min_params=1), nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
            shared.load_state_dict(alone.state_dict())
            shared = strategy.wrap(shared, torch.device("cpu"))
            batch = torch.randn(4, 7)
            for model in (alone, shared):
                model(batch).square().sum().backward()
            expected, found = clip(list(alone.parameters())), strategy.clip(clip, list(shared.parameters()))
            assert type(found) is type(expected)
            if found is not None:
                torch.testing.assert_close(found, expected)
            for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    # All ranks notice a NaN in the shard of one rank.
    cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "norm"
    for norm_type in (2.0, float("inf")):
        cfg.SOLVER.CLIP_GRADIENTS.NORM_TYPE = norm_type
        if comm.get_rank() == 1:
            next(shared.parameters()).grad.to_local()[0, 0] = float("nan")
        norm = strategy.clip(build_grad_clipper(cfg), list(shared.parameters()))
        assert not norm.isfinite()
        assert not next(shared.parameters()).grad.full_tensor().isfinite().all()
    # Evaluations use the running means of rank 0.
    norms = strategy.wrap(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), torch.device("cpu"))
    norms(batch + comm.get_rank())
    strategy.before_evaluation(norms)
    means = comm.all_gather(norms[1].running_mean.tolist())
    result["equal buffers"] = means[0] == means[1]
    write_result(folder, result)


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


def choosing(folder):
    result = {}
    options = [
        "CHECKPOINT.BEST.METRIC", "total_loss", "CHECKPOINT.BEST.MODE", "min", "CHECKPOINT.BEST.PERIOD", "1",
        "CHECKPOINT.BEST.KEEP", "2",
    ]  # fmt: skip
    chosen = trainer(folder, "sharded", *options)
    chosen.train()
    result["sharded"] = chosen.find_hook("BestCheckpointer").best
    comm.synchronize()
    rows = [json.loads(row) for row in (folder / "sharded/metrics.json").read_text().splitlines()]
    result["losses"] = sorted([row["total_loss"], row["iteration"]] for row in rows if "total_loss" in row)
    comm.synchronize()
    if comm.is_main_process():
        (folder / "sharded/last_checkpoint").write_text("model_0000002.pth")
    comm.synchronize()
    other = trainer(folder, "sharded", *options, "SOLVER.BASE_LR", "0.0", resume=True)
    other.train()
    result["other"] = other.find_hook("BestCheckpointer").best
    write_result(folder, result)
