"""Sharded checkpoints keep the rules of single files, and training that is sharded those of training that is not."""

import json
import sys

import pytest
import torch
from ranks import ROOT, finish, fork, run_ranks

from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.weights import averaged_weights, read_checkpoint

# What all scripts here begin with: a trainer of a small model in units.
COMMON = f"""
import threading
from functools import partial
from hookline.engine import DefaultTrainer
from hookline.engine.checkpoint import CheckpointError, saver, sharded, sharded_checkpointer
from hookline.hooks import HookBase
from hookline.engine.parallel.fsdp import FSDP2
from hookline.engine.solver import build_grad_clipper

saver.RETRY_AFTER = 0.0

def trainer(folder, name, *options, resume=False):
    cfg = get_cfg()
    cfg.merge_from_file({str(ROOT / "configs/synthetic/mlp.yaml")!r})
    cfg.merge_from_list([
        "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / name), "SEED", "3", "PARALLEL.NAME", "fsdp2",
        "PARALLEL.ARGS.min_params", "100", "SOLVER.MAX_ITER", "12", "SOLVER.CHECKPOINT_PERIOD", "3",
        "TEST.EVAL_PERIOD", "3", "LOG.PERIOD", "1", *options,
    ])
    torch.manual_seed(3 + comm.get_rank())
    made = DefaultTrainer(cfg)
    made.resume_or_load(resume=resume)
    return made

def whole(state):
    return {{name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}}

def tell(folder, result):
    (folder / f"{{comm.get_rank()}}.json").write_text(json.dumps(result))
"""

TRAINING = (
    COMMON
    + """
class StopAt(HookBase):
    def after_step(self):
        if self.trainer.iter == 7:
            self.trainer.request_stop("enough", exit_code=75)

class Nan(HookBase):
    def after_fetch(self, batch):
        if self.trainer.iter == 5 and comm.get_rank() == 1:
            batch[0][0] = float("nan")

OPTIONS = [
    "CHECKPOINT.ASYNC", "True", "CHECKPOINT.MAX_TO_KEEP", "1", "CHECKPOINT.BEST.KEEP", "2",
    "CHECKPOINT.LOAD_BEST_AT_END", "True", "HOOKS", "[{'NAME': 'EMA', 'ARGS': {'decay': 0.5}}]",
]

def end(trained):
    ema = trained.find_hook("EMA")
    return whole(trained.model.state_dict()), whole(ema.state_dict()["averaged_model"])

def main(folder):
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
    for name, ours, theirs in zip(("model", "averaged"), end(again), end(through)):
        result[name] = all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # Losses that are not finite on one rank.
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
    # bfloat16, a loss scale, accumulation and clipping together.
    scaled = trainer(
        folder, "scaled", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16",
        "SOLVER.ACCUMULATION_STEPS", "2", "SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
        "norm", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.1",
    )
    scaled.train()
    norm = scaled.storage.latest()["grad_norm"][0]
    result["norm"] = norm
    result["scale"] = scaled.grad_scaler.get_scale()
    tell(folder, result)
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    code, output, results = run_ranks(TRAINING, 2, folder)
    assert code == 0, output
    return folder, results


def test_an_interrupted_run_that_is_averaged_and_saved_asynchronously_ends_to_the_bit_as_one_that_was_not(trained):
    folder, results = trained
    for result in results:
        assert result["started"] == 8
        assert result["model"]
        assert result["averaged"]
    rows = [(folder / name / "metrics.json").read_text().splitlines() for name in ("stopped", "through")]
    losses = [[json.loads(row)["total_loss"] for row in part if "total_loss" in row] for part in rows]
    assert losses[0] == losses[1]


def test_folders_are_pruned_and_the_best_ones_kept_like_files(trained):
    folder, results = trained
    assert results[0]["stopped"][:1] == ["model_0000007.pth"]
    left = sorted(path.name for path in (folder / "through").glob("*.pth"))
    assert "model_0000011.pth" in left
    assert "model_0000002.pth" not in left
    assert "model_0000008.pth" not in left
    assert len([name for name in left if name.startswith("model_best")]) == 3  # the best has two names
    assert not list((folder / "through").glob(".hookline-*"))
    assert (folder / "through/last_checkpoint").read_text() == "model_final.pth"
    assert all((folder / "through" / name / ".metadata").is_file() for name in left)


def test_averaged_weights_of_a_sharded_run_are_exported_whole(trained):
    folder, _ = trained
    path = folder / "through/model_0000011.pth"
    export = [sys.executable, ROOT / "tools/export_model.py", "--checkpoint", path, "--weights", "averaged"]
    code, output = finish(fork([*export, "--output", folder / "averaged.pth"], folder))
    assert code == 0, output
    exported = torch.load(folder / "averaged.pth", weights_only=True)
    checkpoint = read_checkpoint(str(path))
    saved = averaged_weights(checkpoint)
    assert exported.keys() == saved.keys() == checkpoint["model"].keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert not all(torch.equal(exported[name], checkpoint["model"][name]) for name in saved)


def test_a_loss_that_is_nan_on_one_rank_is_treated_alike_by_all(trained):
    for result in trained[1]:
        assert result["skipped"] == 1
        assert result["finite"]
        assert result["raised"].startswith("on rank 1 the loss is NaN or infinite at iteration 5")


def test_a_loss_scale_accumulation_and_clipping_work_together_and_the_norm_is_one_number(trained):
    first, second = trained[1]
    assert first["scale"] == second["scale"] > 0
    assert first["norm"] == second["norm"] > 0


SAVING = (
    COMMON
    + """
def main(folder):
    result = {}
    one = trainer(folder, "run", "CHECKPOINT.ASYNC", "True")
    keeper, path = one.checkpointer, folder / "run"
    last = path / "last_checkpoint"
    keeper.save("old")
    keeper.wait()
    before = whole(one.model.state_dict())
    # The write waits: meanwhile the weights change.
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

    # What a rank holds of a folder that is read, and of a file.
    if comm.is_main_process():
        torch.save({"model": before}, folder / "file.pth")
    comm.synchronize()
    for name in ("run/new.pth", "file.pth"):
        part = keeper._load_file(str(folder / name))["model"]
        result[name] = sum(value.to_local().untyped_storage().nbytes() for value in part.values())
    result["whole"] = sum(value.nbytes for value in before.values())
    weights = keeper._load_weights(str(path / "new.pth"))
    result["optimizer unread"] = [
        value for state in weights["trainer"]["optimizer"]["state"].values() for value in state.values()
        if hasattr(value, "to_local")
    ] == []

    # A disk that fails on one rank: in a part, and where last_checkpoint is.
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
    told = []
    keeper.save("never", then=told.append)
    try:
        keeper.wait()
    except CheckpointError as error:
        result["error"] = str(error)
    writer.write_data = parts
    result["told"] = str(told[0])
    comm.synchronize()  # rank 0 clears away what was written
    result["after the error"] = [last.read_text(), sorted(p.name for p in path.glob("*.pth*"))]
    keeper._saver.on_error = "continue"
    tag = keeper.tag_last_checkpoint
    def refuse(name):
        raise OSError(13, "Permission denied")
    keeper.tag_last_checkpoint = refuse
    keeper.save("untagged", then=told.append)
    keeper.wait()
    result["untagged"] = str(told[1])
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
            for ours, theirs in zip(shared.parameters(), alone.parameters()):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    # A NaN in the part of one rank is one of all.
    cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "norm"
    for norm_type in (2.0, float("inf")):
        cfg.SOLVER.CLIP_GRADIENTS.NORM_TYPE = norm_type
        if comm.get_rank() == 1:
            next(shared.parameters()).grad.to_local()[0, 0] = float("nan")
        norm = strategy.clip(build_grad_clipper(cfg), list(shared.parameters()))
        assert not norm.isfinite()
        assert not next(shared.parameters()).grad.full_tensor().isfinite().all()
    # Running means that ranks hold apart are rank 0's when the model is judged.
    norms = strategy.wrap(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), torch.device("cpu"))
    norms(batch + comm.get_rank())
    strategy.before_evaluation(norms)
    means = comm.all_gather(norms[1].running_mean.tolist())
    result["buffers alike"] = means[0] == means[1]
    tell(folder, result)
"""
)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    code, output, results = run_ranks(SAVING, request.param, folder)
    assert code == 0, output
    return folder, results


def test_an_asynchronous_save_is_of_the_state_at_its_call_and_counts_when_it_is_whole(saved):
    for result in saved[1]:
        assert result["last while it is written"] == "old.pth"
        assert result["last"] == "new.pth"
        assert result["of the call"]


def test_a_rank_reads_and_holds_its_part_alone_also_of_a_file(saved):
    results = saved[1]
    for name in ("run/new.pth", "file.pth"):
        assert sum(result[name] for result in results) == results[0]["whole"]
        assert max(result[name] for result in results) < 0.7 * results[0]["whole"]
    assert all(result["optimizer unread"] for result in results)


def test_each_rank_writes_its_share_and_no_other(saved):
    folder, results = saved
    sizes = [(folder / f"run/new.pth/__{rank}_0.distcp").stat().st_size for rank in range(len(results))]
    assert max(sizes) < 0.75 * sum(sizes)


def test_a_disk_that_fails_on_one_rank_fails_for_all_and_the_checkpoint_before_stays(saved):
    folder, results = saved
    for result in results:
        assert result["twice"] == "twice.pth"
        assert "No space left on device" in result["error"]
        assert "make room there" in result["error"]
        assert result["told"] == result["error"]
        assert result["after the error"] == ["twice.pth", ["new.pth", "old.pth", "twice.pth"]]
        assert "Permission denied" in result["untagged"]
    assert "on rank 1: No space" in results[0]["error"]
    assert (folder / "run/last_checkpoint").read_text() == "twice.pth"


def test_running_means_are_alike_when_the_model_is_judged(saved):
    assert all(result["buffers alike"] for result in saved[1])


KILLED = (
    COMMON
    + """
def main(folder):
    one = trainer(folder, "run", "CHECKPOINT.ASYNC", ASYNC)
    one.checkpointer.save("model_0000000", iteration=0)
    one.checkpointer.wait()
    comm.synchronize()
    place = sharded if WHERE != "rename" else sharded.os
    whole = getattr(place, WHERE)
    def killed(*args, **kwargs):
        if comm.get_rank() == RANK and ".hookline-tmp-" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)
    setattr(place, WHERE, killed)
    one.checkpointer.save("model_0000001", iteration=1)
    one.checkpointer.wait()
"""
)


@pytest.mark.parametrize(
    ("rank", "where", "asynchronous"),
    [
        (1, "_checksums", True),
        pytest.param(0, "rename", True, marks=pytest.mark.slow),
        pytest.param(0, "_write_parts", False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path, rank, where, asynchronous):
    code = f"ASYNC, WHERE, RANK = '{asynchronous}', {where!r}, {rank}\n" + KILLED
    exit_code, output, _ = run_ranks(code, 2, tmp_path)
    assert exit_code != 0
    assert "SIGKILL" in output
    run = tmp_path / "run"
    assert (run / "last_checkpoint").read_text() == "model_0000000.pth"
    assert not (run / "model_0000001.pth").exists()
    keeper = Checkpointer(torch.nn.Linear(1, 1), str(run))
    assert keeper._last_whole() == str(run / "model_0000000.pth")
    keeper.save("model_0000002")
    assert not list(run.glob(".hookline-*"))


FAILING = (
    COMMON
    + """
class Fail(HookBase):
    def before_step(self):
        if self.trainer.iter == 5 and comm.get_rank() == 1:
            raise ValueError("the reason")

def main(folder):
    one = trainer(folder, "run", "CHECKPOINT.ON_EXCEPTION", "True", "CHECKPOINT.ASYNC", "True")
    one.register_hooks([Fail()])
    one.train()
"""
)


def test_a_rank_that_fails_alone_does_not_wait_for_others_to_save(tmp_path):
    code, output, _ = run_ranks(FAILING, 2, tmp_path, timeout=120)
    assert code == 1
    assert "ValueError: the reason" in output
    run = tmp_path / "run"
    assert not (run / "model_exception.pth").exists()
    assert (run / "last_checkpoint").read_text() == "model_0000002.pth"


CHOOSING = (
    COMMON
    + """
def main(folder):
    result = {}
    options = ["CHECKPOINT.BEST.METRIC", "total_loss", "CHECKPOINT.BEST.MODE", "min", "CHECKPOINT.BEST.PERIOD", "1",
               "CHECKPOINT.BEST.KEEP", "2"]
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
    tell(folder, result)
"""
)


def test_the_best_by_a_loss_are_chosen_by_its_mean_over_ranks_also_after_a_resume_to_before(tmp_path):
    code, output, results = run_ranks(CHOOSING, 2, tmp_path)
    assert code == 0, output
    assert results[0] == results[1]
    assert results[0]["sharded"] == [pytest.approx(row) for row in results[0]["losses"][:2]]
    best = torch.load(tmp_path / "sharded/model_best.pth/state.pth", weights_only=True)
    assert [best["best_metric"]["value"], best["iteration"]] == results[0]["other"][0]
