"""Sharded checkpoints: training, saving, and faults while saving."""

import json
import os
import signal
import threading

import pytest
import torch
from parts import CLIP, run_of, whole
from small_runs import same

from hookline.engine import comm
from hookline.engine.checkpoint import CheckpointError, files, sharded, sharded_checkpointer
from hookline.engine.checkpoint.find_checkpoint import find_checkpoint
from hookline.hooks import CallbackHook

files.RETRY_AFTER = 0.0


def trainer(folder, name, *options, resume=False):
    given = ["PARALLEL.NAME", "fsdp2", "PARALLEL.ARGS.min_params", 100, "SOLVER.MAX_ITER", 12]
    given += ["SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 3]
    return run_of(folder / name, *given, *options, resume=resume)


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


def nan_batch(trainer, batch):
    if trainer.iter == 5 and comm.get_rank() == 1:
        batch[0][0] = float("nan")


def nan_shard(trainer):
    """A gradient that is NaN in rank 1's shard only."""
    if trainer.iter == 6 and comm.get_rank() == 1:
        next(trainer.model.parameters()).grad.to_local().fill_(float("nan"))


OPTIONS = [
    "CHECKPOINT.ASYNC", "True", "CHECKPOINT.MAX_TO_KEEP", "1", "CHECKPOINT.BEST.KEEP", "2",
    "CHECKPOINT.LOAD_BEST_AT_END", "True", "HOOKS", "[{'NAME': 'EMA', 'ARGS': {'decay': 0.5}}]",
    "SOLVER.OPTIMIZERS.first", {"PARAMS": "1", "OPTIMIZER": {"NAME": "Adam"}}, "SOLVER.OPTIMIZERS.others", {},
]  # fmt: skip
SHORT = ["SOLVER.MAX_ITER", "6", "DATASETS.TEST", "()"]


def is_finite(trained):
    return all(bool(weight.isfinite().all()) for weight in whole(trained.model.state_dict()).values())


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("*.pth*"))


# ---------------------------------------------------------------------- training


def check_an_interrupted_run_with_ema_and_async_saves_resumes_to_identical_weights(folder):
    through = trainer(folder, "through", *OPTIONS)
    through.train()
    stopped = trainer(folder, "stopped", *OPTIONS)
    stopped.register_hooks([CallbackHook(after_step=lambda t: t.iter == 7 and t.request_stop("enough", exit_code=75))])
    stopped.train()
    assert checkpoints(folder / "stopped")[0] == "model_0000007.pth"  # older ones are removed
    again = trainer(folder, "stopped", *OPTIONS, resume=True)
    assert again.start_iter == 8
    again.train()
    assert same(whole(again.model.state_dict()), whole(through.model.state_dict()))
    ours, theirs = (whole(one.find_hook("EMA").state_dict()["averaged_model"]) for one in (again, through))
    assert same(ours, theirs)
    left = checkpoints(folder / "through")
    assert [name for name in left if "best" not in name] == ["model_0000011.pth", "model_final.pth"]
    assert len(left) == 5  # the best has two names
    assert not list((folder / "through").glob(".hookline-*"))


def check_all_ranks_handle_a_nan_of_one_rank_and_do_not_save_it(folder):
    skipping = trainer(folder, "skip", "SOLVER.NONFINITE_LOSS", "skip", *SHORT)
    skipping.register_hooks([CallbackHook(after_fetch=nan_batch)])
    skipping.train()
    assert (skipping.nonfinite.steps, is_finite(skipping)) == (1, True)
    raising = trainer(folder, "raise")
    raising.register_hooks([CallbackHook(after_fetch=nan_batch)])
    with pytest.raises(FloatingPointError, match="on rank 1 the loss is NaN or infinite at iteration 5"):
        raising.train()
    alone = trainer(folder, "alone", *CLIP, "LOG.PERIOD", "20")
    alone.register_hooks([CallbackHook(after_backward=nan_shard)])
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


def check_an_asynchronous_save_has_the_state_of_its_call(folder):
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
    assert same(whole(keeper._load_file(str(run / "new.pth"))["model"]), before)
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
        assert same(whole(keeper.model.state_dict()), before), place
        read = keeper._load_file(find_checkpoint(str(place)), mmap=True)["model"].values()
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
    keeper.on_error = "continue"
    keeper.save("again", then=errors.append)
    keeper.wait()
    writer.write_data = write
    assert "No space left on device" in str(errors[1])
    assert str(errors[0]) == str(caught.value)
    assert comm.get_rank() or "on rank 1: No space" in str(caught.value)
    comm.synchronize()  # rank 0 removes what was written
    assert (run / "last_checkpoint").read_text() == "twice.pth"
    assert checkpoints(run) == ["old.pth", "twice.pth"]


def check_a_folder_with_a_corrupt_part_is_skipped_and_replaced(folder):
    made = trainer(folder, "run", *SHORT)
    made.train()
    comm.synchronize()
    if comm.is_main_process():
        with open(folder / "run/model_final.pth/__1_0.distcp", "r+b") as file:  # which rank 0 does not read
            file.write(b"corrupt")
        (folder / "run/model_0000005.pth/checksums.json").unlink()
    comm.synchronize()
    resumed = trainer(folder, "run", *SHORT, resume=True)
    assert resumed.start_iter == 3
    resumed.train()
    comm.synchronize()
    assert (folder / "run/model_0000005.pth.old/state.pth").exists()
    assert trainer(folder, "run", *SHORT, resume=True).start_iter == 6


# ---------------------------------------------------------------------- faults


def killed(folder):
    one = trainer(folder, "run", "CHECKPOINT.ASYNC", "True")
    one.checkpointer.save("model_0000000", iteration=0)
    one.checkpointer.wait()
    comm.synchronize()
    checksums = sharded.checksums

    def killed(*args, **kwargs):
        if comm.get_rank() == 1 and ".hookline-tmp-" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return checksums(*args, **kwargs)

    sharded.checksums = killed
    one.checkpointer.save("model_0000001", iteration=1)
    one.checkpointer.wait()


def failing(folder):
    def fail(trainer):
        if trainer.iter == 5 and comm.get_rank() == 1:
            raise ValueError("the reason")

    one = trainer(folder, "run", "CHECKPOINT.ON_EXCEPTION", "True", "CHECKPOINT.ASYNC", "True")
    one.register_hooks([CallbackHook(before_step=fail)])
    one.train()
