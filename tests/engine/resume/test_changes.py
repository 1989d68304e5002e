"""Changes of the config on a resume."""

import functools
import json
import logging

import pytest
import torch
from small_runs import mlp_config

from hookline.config import ConfigError
from hookline.engine import DefaultTrainer, seed_all_rng
from hookline.engine.resume.changes import apply_changes
from hookline.engine.resume.lengths import epoch_offset
from hookline.hooks import BestCheckpointer, CallbackHook, EarlyStopping, EvalHook, HookBase


@pytest.fixture
def log():
    """The log records of hookline, also after setup_logger turned off propagation."""

    class Lines(logging.Handler):
        def __init__(self):
            super().__init__(logging.WARNING)
            self.text = ""

        def emit(self, record):
            self.text += record.getMessage() + "\n"

    handler = Lines()
    logging.getLogger("hookline").addHandler(handler)
    yield handler
    logging.getLogger("hookline").removeHandler(handler)


@pytest.fixture
def make(tmp_path):
    """Trainers of one run: a small MLP on synthetic data."""

    def make(*overrides, resume=False):
        cfg = mlp_config(tmp_path)
        cfg.merge_from_list(["MODEL.ARGS.hidden", (4,)])
        cfg.SOLVER.LR_SCHEDULER_NAME = "WarmupConstantLR"
        cfg.SOLVER.WARMUP_ITERS = 0
        cfg.SOLVER.MAX_ITER = 4
        cfg.SEED = 0
        cfg.merge_from_list(list(overrides))
        seed_all_rng(0)
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=resume)
        return trainer

    return make


def rates(trainer):
    seen = []
    note = CallbackHook(before_step=lambda t: seen.append(t.optimizer.param_groups[0]["lr"]))
    trainer.register_hooks([note])
    trainer.train()
    return seen


def test_a_changed_learning_rate_is_used_and_logged(make, log):
    make("SOLVER.BASE_LR", 0.01).train()
    trainer = make("SOLVER.BASE_LR", 0.5, "SOLVER.MAX_ITER", 6, resume=True)
    assert rates(trainer) == [0.5, 0.5]
    assert "SOLVER.BASE_LR = 0.5 instead of 0.01" in log.text


def test_a_longer_run_follows_its_own_schedule_from_the_first_step(make):
    linear = ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.BASE_LR", 1.0]
    whole = rates(make(*linear, "SOLVER.MAX_ITER", 8))
    make(*linear).train()
    assert rates(make(*linear, "SOLVER.MAX_ITER", 8, resume=True)) == pytest.approx(whole[4:])


def test_a_changed_weight_decay_is_used(make):
    make("SOLVER.WEIGHT_DECAY", 0.1).train()
    trainer = make("SOLVER.WEIGHT_DECAY", 0.2, resume=True)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.2


def test_hyperparameters_changed_by_hooks_are_kept(make):
    first = make()

    def change(trainer):
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.7

    first.register_hooks([CallbackHook(after_step=change)])
    first.train()
    assert make("SOLVER.BASE_LR", 0.5, resume=True).optimizer.param_groups[0]["weight_decay"] == 0.7


def test_an_unchanged_config_logs_nothing(make, log):
    first = make()
    first.train()
    second = make(resume=True)
    assert "Resuming with " not in log.text
    assert str(second.optimizer.state_dict()["param_groups"]) == str(first.optimizer.state_dict()["param_groups"])


def test_implementation_options_of_the_optimizer_come_from_the_config(make):
    make("SOLVER.OPTIMIZER.ARGS.foreach", True).train()
    trainer = make("SOLVER.OPTIMIZER.ARGS.foreach", False, resume=True)
    assert trainer.optimizer.param_groups[0]["foreach"] is False


def test_another_model_is_an_error_with_the_remedy(make):
    make().train()
    with pytest.raises(ConfigError, match=r"do not fit.*MODEL\.WEIGHTS"):
        make("MODEL.ARGS.hidden", (4, 4), resume=True)


def test_smoothed_metrics_continue_after_a_resume(make, tmp_path):
    def rows(folder):
        keep = ("iteration", "loss", "lr")
        lines = (json.loads(line) for line in (folder / "metrics.json").read_text().splitlines())
        return [{key: row[key] for key in keep if key in row} for row in lines]

    log = ["LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 8, "SOLVER.CHECKPOINT_PERIOD", 3]
    make(*log, "SOLVER.MAX_ITER", 20, "OUTPUT_DIR", str(tmp_path / "whole")).train()
    broken = make(*log, "SOLVER.MAX_ITER", 20)

    class Killed(BaseException):
        pass

    def kill(trainer):
        raise Killed

    for stop in (7, 13):
        broken.register_hooks([CallbackHook(before_step=lambda t, s=stop: kill(t) if t.iter == s else None)])
        with pytest.raises(Killed):
            broken.train()
        broken = make(*log, "SOLVER.MAX_ITER", 20, resume=True)
    broken.train()
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert [row["iteration"] for row in rows(tmp_path)] == [7, 15, 19]
    ours, theirs = (
        torch.load(folder / "model_final.pth", weights_only=True)["model"] for folder in (tmp_path, tmp_path / "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_evaluation_between_last_write_and_checkpoint_is_written_once(make, tmp_path):
    """Evaluated at 4, saved at 5, written at 7, killed at 9: the row of 4 was written after the checkpoint."""
    make = functools.partial(make, "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"], "TEST.EVAL_PERIOD", 5)
    make = functools.partial(make, "LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 8, "SOLVER.CHECKPOINT_PERIOD", 6)
    killed = make("SOLVER.MAX_ITER", 12)

    def kill(trainer):
        if trainer.iter == 9:
            raise KeyboardInterrupt

    killed.register_hooks([CallbackHook(before_step=kill)])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    make("SOLVER.MAX_ITER", 12, resume=True).train()
    iterations = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert iterations == [4, 7, 9, 11, 12]


def test_a_resume_finishes_a_run_killed_after_its_last_step(make, tmp_path):
    make = functools.partial(make, "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"])
    make = functools.partial(make, "LOG.WRITERS", ["JSONWriter"], "SOLVER.CHECKPOINT_PERIOD", 2)
    make().train()
    final, rows = tmp_path / "model_final.pth", (tmp_path / "metrics.json").read_text().splitlines()
    whole = torch.load(final, weights_only=True)
    final.unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000003.pth")
    make(resume=True).train()
    ended = torch.load(final, weights_only=True)
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert ended["iteration"] == whole["iteration"] == 3
    assert all(torch.equal(ended["model"][name], weight) for name, weight in whole["model"].items())
    assert ended["trainer"]["hooks"].keys() == whole["trainer"]["hooks"].keys()
    assert [json.loads(row)["iteration"] for row in (tmp_path / "metrics.json").read_text().splitlines()] == [
        json.loads(row)["iteration"] for row in rows
    ]
    written = final.stat().st_mtime_ns
    make(resume=True).train()  # the run is over: nothing is trained
    assert final.stat().st_mtime_ns == written


# ---------------------------------------------------------------------------- runs that are over


class Killed(BaseException):
    """Simulates a kill within this process."""


def killed_at(trainer, name):
    """Kill a run when it starts to save a file."""
    save = trainer.checkpointer.save

    def kill(what, **kwargs):
        if what == name:
            raise Killed
        save(what, **kwargs)

    trainer.checkpointer.save = kill


STOPPED = [
    *("DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"], "TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 3),
    *("SOLVER.MAX_ITER", 40, "SOLVER.CHECKPOINT_PERIOD", 4, "LOG.WRITERS", ["JSONWriter"]),
    *("MODEL.ARGS.dropout", 0.5, "SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR"),
]


def stopping(patience=2):
    """Early stopping after 4 * (patience + 1) iterations: no accuracy is better than the first."""
    arguments = {"metric": "synthetic/accuracy", "patience": patience, "min_delta": 1}
    return ["HOOKS", [{"NAME": "EarlyStopping", "ARGS": arguments}]]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "log.txt"}


def final_state(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)


def assert_same_final(folder, other):
    """Assert equal weights, random states, hooks and metrics."""

    def comparable(folder):
        state = final_state(folder)
        run = {key: value for key, value in state["trainer"].items() if key not in ("storage", "run")}
        for key in [key for key in run["hooks"] if key.startswith(("PeriodicWriter", "IterationTimer"))]:
            del run["hooks"][key]
        rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
        times = ("time", "data_time", "eta_seconds")
        rows = [{key: value for key, value in row.items() if key not in times} for row in rows]
        return {name: weight.tolist() for name, weight in state["model"].items()}, str(run), rows

    assert comparable(folder) == comparable(other)


def test_an_early_stopped_run_does_not_train_after_a_resume(make, tmp_path, log):
    log.setLevel(logging.INFO)
    first = make(*STOPPED, *stopping())
    result = first.train()
    assert (result.iteration, result.exit_code) == (12, 0)
    end = final_state(tmp_path)["trainer"]["end"]
    assert (end["reason"], end["iteration"], end["complete"]) == (result.reason, 12, True)
    assert result.reason.startswith("early stopping")
    before = content(tmp_path)
    for _ in range(2):
        log.text = ""
        again = make(*STOPPED, *stopping(), resume=True)
        repeated = again.train()
        assert (repeated.reason, repeated.iteration, repeated.exit_code) == (result.reason, 12, 0)
        accuracy = "synthetic/accuracy"
        assert repeated.metrics[accuracy] == result.metrics[accuracy]
        assert again._last_eval_results == first._last_eval_results
        [line] = [line for line in log.text.splitlines() if "Nothing to train" in line]
        assert "ended at iteration 12 (early stopping" in line
        assert "To continue, raise SOLVER.MAX_ITER above 40" in line
        assert content(tmp_path) == before
        assert all(torch.equal(w, first.model.state_dict()[name]) for name, w in again.model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "iteration"),
    [
        (["SOLVER.MAX_ITER", 44], 16),  # until the hook stops it again at the next evaluation
        (stopping(patience=4), 12),
        (["HOOKS", []], 12),
        (["LOG.PERIOD", 5, "DATALOADER.NUM_WORKERS", 1], 12),
        (["HOOKS", [*stopping()[1], {"NAME": "MemoryMonitor"}]], 12),
        (["SOLVER.MAX_ITER", 30, "SOLVER.BASE_LR", 0.5], 12),
    ],
)
def test_an_early_stopped_run_continues_only_if_longer(make, changes, iteration):
    make(*STOPPED, *stopping()).train()
    assert make(*STOPPED, *stopping(), *changes, resume=True).train().iteration == iteration


def test_a_run_stopped_by_its_loss_continues_only_if_longer(make):
    diverging = ["SOLVER.NONFINITE_LOSS", "stop", "SOLVER.MAX_ITER", 40]
    first = make(*diverging)

    def spoil(trainer, batch):
        if trainer.iter == 5:
            batch[0].fill_(float("nan"))

    first.register_hooks([CallbackHook(after_fetch=spoil)])
    assert "NaN" in first.train().reason
    assert make(*diverging, "SOLVER.BASE_LR", 0.002, resume=True).train().iteration == 6
    assert make(*diverging, "SOLVER.BASE_LR", 0.002, "SOLVER.MAX_ITER", 44, resume=True).train().iteration == 44


def test_an_early_stopped_run_killed_before_its_final_save_equals_the_untouched_run(make, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = make(*STOPPED, *stopping(), "OUTPUT_DIR", str(whole)).train()
    trainer = make(*STOPPED, *stopping(), "OUTPUT_DIR", str(killed))
    killed_at(trainer, "model_final")
    with pytest.raises(Killed):
        trainer.train()
    assert (killed / "last_checkpoint").read_text() == "model_0000011.pth"
    seed_all_rng(5)
    resumed = make(*STOPPED, *stopping(), "OUTPUT_DIR", str(killed), resume=True).train()
    assert (resumed.reason, resumed.iteration) == (result.reason, 12)
    assert (killed / "last_checkpoint").read_text() == "model_final.pth"
    assert_same_final(killed, whole)


def test_a_run_killed_in_its_final_save_and_extended_equals_the_untouched_run(make, tmp_path):
    """The evaluation after the last step draws random numbers: they must be drawn once."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    even = [*STOPPED, "SOLVER.MAX_ITER", 12, "SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR"]
    make(*even, "OUTPUT_DIR", str(whole)).train()
    trainer = make(*even, "OUTPUT_DIR", str(killed))
    killed_at(trainer, "model_final")
    with pytest.raises(Killed):
        trainer.train()
    resumed = make(*even, "OUTPUT_DIR", str(killed), resume=True)
    seed_all_rng(5)
    resumed.train()
    assert_same_final(killed, whole)
    for folder in (whole, killed):
        seed_all_rng(7)
        make(*even, "SOLVER.MAX_ITER", 20, "OUTPUT_DIR", str(folder), resume=True).train()
    assert_same_final(killed, whole)


def test_a_second_train_repeats_a_failed_final_save(make, tmp_path):
    trainer = make(*STOPPED, "SOLVER.MAX_ITER", 10)
    save = trainer.checkpointer.save
    killed_at(trainer, "model_final")
    with pytest.raises(Killed):
        trainer.train()
    trainer.checkpointer.save = save
    assert trainer.train().iteration == 10
    assert final_state(tmp_path)["trainer"]["end"]["complete"]


def test_an_early_stopped_run_that_is_interrupted_in_its_last_step_has_ended(make):
    trainer = make(*STOPPED, *stopping())
    interrupt = CallbackHook(before_step=lambda t: t.request_stop("signal", 75) if t.iter == 11 else None)
    trainer.register_hooks([interrupt])
    result = trainer.train()
    assert (result.reason.split(":")[0], result.iteration, result.exit_code) == ("early stopping", 12, 0)
    assert make(*STOPPED, *stopping(), resume=True).train().iteration == 12


def test_resuming_a_complete_run_returns_its_results_and_writes_nothing(make, tmp_path):
    best = ["CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "CHECKPOINT.LOAD_BEST_AT_END", True]
    first = make(*STOPPED, *best)
    result = first.train()
    before = content(tmp_path)
    again = make(*STOPPED, *best, resume=True)
    repeated = again.train()
    assert (repeated.reason, repeated.iteration) == (result.reason, result.iteration) == ("completed", 40)
    assert again._last_eval_results == first._last_eval_results
    assert all(torch.equal(w, first.model.state_dict()[name]) for name, w in again.model.state_dict().items())
    assert content(tmp_path) == before
    again.max_iter = 44
    with pytest.raises(ConfigError, match="LOAD_BEST_AT_END"):  # the model has the best weights
        again.train()
    again.resume_or_load(resume=True)
    assert again.train().iteration == 44


@pytest.mark.parametrize("period", [20, 1])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_continued_run_keeps_the_row_of_its_former_final_evaluation(make, tmp_path, resumes, period):
    arguments = [*STOPPED, "TEST.EVAL_PERIOD", 10, "LOG.PERIOD", period, "LOG.WRITERS", ["JSONWriter", "CSVWriter"]]

    def rows():
        return [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]

    trainer = make(*arguments, "SOLVER.MAX_ITER", 20)
    trainer.train()
    [final] = [row for row in rows() if row["iteration"] == 20]
    if resumes:
        before = content(tmp_path)
        make(*arguments, "SOLVER.MAX_ITER", 20, resume=True).train()
        assert content(tmp_path) == before
        trainer = make(*arguments, "SOLVER.MAX_ITER", 40, resume=True)
    trainer.max_iter = 40
    trainer.train()
    iterations = [row["iteration"] for row in rows()]
    assert [row["iteration"] for row in rows() if "synthetic/accuracy" in row] == [9, 20, 29, 40]
    assert iterations == ([9, 19, 20, 29, 39, 40] if period == 20 else list(range(41)))
    [kept] = [row for row in rows() if row["iteration"] == 20]
    assert final.items() <= kept.items()
    assert ("total_loss" in kept) == (period == 1)
    assert [int(line.split(",")[0]) for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]] == iterations


def test_a_hook_that_loads_weights_at_the_end_leaves_the_runs_position(make, tmp_path, log):
    arguments = [*STOPPED, "SOLVER.MAX_ITER", 13]

    class LoadsFirst(HookBase):
        def after_train(self):
            self.trainer.checkpointer.load(str(tmp_path / "model_0000003.pth"))

    trainer = make(*arguments)
    trainer.register_hooks([LoadsFirst()])
    assert trainer.train().iteration == 13
    assert "the model has its weights now. Iteration (13), optimizer, hooks and data stay" in log.text
    assert (trainer.iter, trainer.finished_iter) == (13, 12)
    final, first = final_state(tmp_path), torch.load(tmp_path / "model_0000003.pth", weights_only=True)
    assert (final["iteration"], final["trainer"]["iteration"], final["trainer"]["end"]["iteration"]) == (12, 12, 13)
    assert all(torch.equal(weight, first["model"][name]) for name, weight in final["model"].items())
    rows = [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert rows == [2, 3, 5, 7, 8, 11, 12, 13]


def test_a_shortened_run_has_ended(make):
    first = make("SOLVER.MAX_ITER", 20)

    def shorten(trainer):
        trainer.max_iter = trainer.iter + 1

    first.register_hooks([CallbackHook(after_step=lambda t: shorten(t) if t.iter == 4 else None)])
    assert first.train().iteration == 5
    assert make("SOLVER.MAX_ITER", 20, resume=True).train().iteration == 5
    assert make("SOLVER.MAX_ITER", 24, resume=True).train().iteration == 24


# ---------------------------------------------------------------------------- the table of docs/checkpoints.md

SIZE = 1024  # samples of the synthetic set


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("SOLVER.BASE_LR", 0.01, 0.02),
        ("SOLVER.WEIGHT_DECAY", 0.1, 0.2),
        ("SOLVER.ACCUMULATION_STEPS", 1, 2),
        ("SOLVER.AMP.ENABLED", False, True),
        ("SOLVER.LR_SCHEDULER_NAME", "WarmupConstantLR", "WarmupCosineLR"),
        ("DATALOADER.NUM_WORKERS", 0, 1),
        ("DATALOADER.SAMPLER_TRAIN", "EpochSampler", "TrainingSampler"),
        ("DATALOADER.BATCH_SIZE", 16, 32),
        ("DATASETS.TRAIN", ("synthetic",), ("synthetic", "synthetic")),
        ("SEED", 0, 1),
        ("HOOKS", [], [{"NAME": "MemoryMonitor"}]),
        ("MODEL.CHANNELS_LAST", False, True),
        ("LOG.PERIOD", 20, 10),
    ],
)
def test_each_change_is_logged(make, log, key, before, now):
    make(key, before).train()
    trainer = make(key, now, "SOLVER.MAX_ITER", 6, resume=True)
    assert f"Resuming with {key} = {now!r} instead of " in log.text
    assert trainer.start_iter == 4
    assert trainer.train().iteration == 6


@pytest.mark.parametrize(("before", "now"), [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_another_optimizer_class_is_an_error_with_the_remedy(make, before, now):
    make("SOLVER.OPTIMIZER.NAME", before).train()
    with pytest.raises(ConfigError, match=rf"SOLVER\.OPTIMIZER\.NAME: .* change it back to {before}.*MODEL\.WEIGHTS"):
        make("SOLVER.OPTIMIZER.NAME", now, resume=True)


def test_an_incompatible_schedule_class_is_an_error(make):
    make("SOLVER.STEPS", ()).train()
    other = ["SOLVER.LR_SCHEDULER_NAME", "torch.optim.lr_scheduler:StepLR", "SOLVER.LR_SCHEDULER_ARGS.step_size", 3]
    with pytest.raises(ConfigError, match=r"SOLVER\.LR_SCHEDULER_NAME: .* cannot load"):
        make(*other, resume=True)


def test_a_failed_resume_does_not_change_files(make, tmp_path):
    make().train()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ConfigError):
        make("SOLVER.OPTIMIZER.NAME", "Adam", resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_another_schedule_is_followed_from_the_present_iteration(make):
    cosine = ["SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.BASE_LR", 1.0, "SOLVER.MAX_ITER", 8]
    whole = rates(make(*cosine))
    make().train()
    assert rates(make(*cosine, resume=True)) == pytest.approx(whole[4:])


def test_another_number_of_processes_and_of_samples_is_logged(make, log):
    trainer = make()
    trainer.train()
    saved = {**trainer.state_dict()["run"], "world_size": 2, "samples": 20}
    apply_changes(trainer, saved)
    assert "Resuming with 1 process(es) instead of 2" in log.text
    assert f"Resuming with {SIZE} training samples instead of 20" in log.text


# ---------------------------------------------------------------------------- another batch size


def samples_seen(trainer):
    """Records the samples of each batch by their first number."""
    seen = []
    note = CallbackHook(after_fetch=lambda t, batch: seen.append(batch[0][:, 0].tolist()))
    trainer.register_hooks([note])
    return seen


@pytest.mark.parametrize("size", [16, 64, 24])
def test_another_batch_size_still_sees_each_sample_once(make, size):
    first = make("DATALOADER.BATCH_SIZE", 32, "SOLVER.MAX_ITER", 5)
    before = samples_seen(first)
    first.train()
    second = make("DATALOADER.BATCH_SIZE", size, "SOLVER.MAX_ITER", "1ep", resume=True)
    after = samples_seen(second)
    result = second.train()
    seen = [sample for batch in before + after for sample in batch]
    assert len(seen) == len(set(seen)) == SIZE
    # Iterations count updates: 5 before the resume, and those of the rest of the epoch.
    assert result.iteration == 5 + -(-(SIZE - 5 * 32) // size) == second.max_iter


def test_lengths_in_epochs_are_exact_after_two_batch_size_changes(make):
    linear = ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.WARMUP_ITERS", "1ep", "SOLVER.BASE_LR", 1.0]
    epochs = [*linear, "SOLVER.MAX_ITER", "8ep"]
    sizes = []

    def until(epoch, *overrides, resume=True):
        trainer = make(*epochs, *overrides, resume=resume)
        stop = CallbackHook(after_epoch=lambda t: t.request_stop("", exit_code=75) if t.epoch + 1 == epoch else None)
        trainer.register_hooks([stop])
        sizes.append((trainer.train().iteration, trainer.max_iter))

    until(2, "DATALOADER.BATCH_SIZE", 64, resume=False)  # 16 iterations an epoch
    until(4, "DATALOADER.BATCH_SIZE", 128)  # 8
    until(5, "DATALOADER.BATCH_SIZE", 128)  # the same again
    until(8, "DATALOADER.BATCH_SIZE", 32)  # 32
    assert sizes == [(32, 128), (48, 80), (56, 80), (152, 152)]


def test_a_length_in_epochs_continues_from_the_position_of_the_resume():
    assert epoch_offset({"length": 16, "offset": 3}, 80, 5, 0, 16) == 3
    assert epoch_offset({}, 80, 5, 0, 16) == 0
    assert epoch_offset({"length": 16, "offset": 0}, 84, 5, 2, 8) == 42  # 5.25 epochs are done in 84 iterations
    assert epoch_offset({"length": 16, "offset": 0}, 84, 5, 2, None) == 0


def test_another_batch_size_changes_the_schedule_in_epochs(make):
    linear = ["SOLVER.LR_SCHEDULER_NAME", "WarmupLinearLR", "SOLVER.BASE_LR", 1.0, "SOLVER.MAX_ITER", "4ep"]
    first = make(*linear, "DATALOADER.BATCH_SIZE", 64)
    first.register_hooks([CallbackHook(before_step=lambda t: t.request_stop("", 75) if t.iter == 31 else None)])
    first.train()
    second = make(*linear, "DATALOADER.BATCH_SIZE", 128, resume=True)
    assert rates(second) == pytest.approx([1 - iteration / 48 for iteration in range(32, 48)])


def test_a_length_in_iterations_counts_updates_of_any_batch_size(make):
    make("DATALOADER.BATCH_SIZE", 64, "SOLVER.MAX_ITER", 4).train()
    trainer = make("DATALOADER.BATCH_SIZE", 128, "SOLVER.MAX_ITER", 10, resume=True)
    assert trainer.train().iteration == 10


# ---------------------------------------------------------------------------- end to end


def test_early_stopping_and_best_continue_after_a_resume(make):
    outcomes = {3: 0.5, 7: 0.9, 11: 0.3, 15: 0.4, 19: 0.2, 20: 0.1}

    def run(resume, stop):
        trainer = make("SOLVER.MAX_ITER", 20, "SOLVER.CHECKPOINT_PERIOD", 2, resume=False)
        hooks = [
            EvalHook(4, lambda: {"score": outcomes[trainer.iter]}),
            EarlyStopping("score", patience=3),
            BestCheckpointer(0, trainer.checkpointer, "score"),
            CallbackHook(before_step=lambda t: t.request_stop("", exit_code=75) if t.iter == stop else None),
        ]
        trainer.remove_hook(EvalHook)
        trainer.register_hooks(hooks)
        if resume:
            trainer.resume_or_load(resume=True)
        return trainer.train(), hooks[2]

    run(resume=False, stop=9)
    result, _ = run(resume=True, stop=17)
    assert result.exit_code == 75
    result, best = run(resume=True, stop=None)
    assert (result.reason, result.iteration) == (
        "early stopping: score has not been better than 0.9 for 3 evaluations",
        20,
    )
    assert best.best == [(0.9, 7)]


def test_the_console_continues_the_iteration_count(make, log):
    log.setLevel(logging.INFO)
    arguments = ["LOG.WRITERS", ["CommonMetricPrinter"], "LOG.PERIOD", 4]
    make(*arguments, "SOLVER.MAX_ITER", 8).train()
    log.text = ""
    make(*arguments, "SOLVER.MAX_ITER", 16, resume=True).train()
    lines = [line for line in log.text.splitlines() if " iter: " in line]
    assert [line.split("iter: ")[1].split()[0] for line in lines] == ["11/16", "15/16"]


def test_load_best_at_end_reports_the_best_results(make, monkeypatch):
    tested = [
        *("DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"], "TEST.EVAL_PERIOD", 10),
        *("CHECKPOINT.BEST.METRIC", "synthetic/accuracy", "CHECKPOINT.BEST.MODE", "min"),
        *("CHECKPOINT.LOAD_BEST_AT_END", True, "SOLVER.MAX_ITER", 40, "SOLVER.BASE_LR", 0.5),
    ]
    trainer = make(*tested)
    trainer.train()
    best = trainer.find_hook(BestCheckpointer)
    assert best.loaded_iter == best.best_iter < 40
    assert trainer._last_eval_results["synthetic"]["accuracy"] == pytest.approx(best.best_metric)
    assert trainer.evaluate()["synthetic"]["accuracy"] == pytest.approx(best.best_metric)


def test_the_console_shows_the_new_length_with_another_batch_size(make):
    arguments = ["LOG.WRITERS", ["CommonMetricPrinter"], "SOLVER.MAX_ITER", "2ep"]
    first = make(*arguments, "DATALOADER.BATCH_SIZE", 64)
    first.register_hooks([CallbackHook(after_epoch=lambda trainer: trainer.request_stop("", exit_code=75))])
    first.train()
    second = make(*arguments, "DATALOADER.BATCH_SIZE", 128, resume=True)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hookline").addHandler(handler)
    second.train()
    logging.getLogger("hookline").removeHandler(handler)
    assert any("iter: 23/24" in line for line in lines)


def test_each_iteration_is_written_once_after_interruption_and_kill(make, tmp_path):
    arguments = ["LOG.WRITERS", ["JSONWriter", "TensorboardXWriter"], "LOG.PERIOD", 3, "SOLVER.MAX_ITER", 20]
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    make(*arguments, "OUTPUT_DIR", whole).train()

    def stop(trainer):
        if trainer.iter == 7 and trainer.start_iter == 0:
            trainer.request_stop("interrupted", exit_code=75)
        if trainer.iter == 13 and trainer.start_iter == 8:
            raise KeyboardInterrupt

    for resume in (False, True, True):
        trainer = make(*arguments, "OUTPUT_DIR", broken, "SOLVER.CHECKPOINT_PERIOD", 5, resume=resume)
        trainer.register_hooks([CallbackHook(before_step=stop)])
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert trainer.iter == 13
    rows = [json.loads(line) for line in (tmp_path / "broken" / "metrics.json").read_text().splitlines()]
    expected = [json.loads(line) for line in (tmp_path / "whole" / "metrics.json").read_text().splitlines()]
    times = ("time", "data_time", "eta_seconds")
    assert [{k: v for k, v in row.items() if k not in times} for row in rows] == [
        {k: v for k, v in row.items() if k not in times} for row in expected
    ]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def points(folder):
        events = EventAccumulator(folder, size_guidance={"scalars": 0})
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("train/loss")]

    assert points(broken) == points(whole)


def test_another_factor_of_a_parameter_group_is_used(make, log):
    make("SOLVER.PARAM_GROUPS", [{"REGEX": "weight", "LR_FACTOR": 0.5}]).train()
    trainer = make("SOLVER.PARAM_GROUPS", [{"REGEX": "weight", "LR_FACTOR": 0.25}], resume=True)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[0] == pytest.approx(rates[1] / 4)
    assert "Resuming with SOLVER.PARAM_GROUPS" in log.text


def test_parameters_in_other_groups_are_an_error_with_the_remedy(make):
    make("SOLVER.PARAM_GROUPS", [{"REGEX": "weight", "LR_FACTOR": 0.5}]).train()
    for rules in ([{"REGEX": r"^1\.", "LR_FACTOR": 0.5}], []):
        with pytest.raises(ConfigError, match=r"SOLVER\.PARAM_GROUPS: .* other groups.*MODEL\.WEIGHTS to"):
            make("SOLVER.PARAM_GROUPS", rules, resume=True)
