import copy
import json
import os
import re
import shutil
import time

import pytest
import torch
from small_runs import config_trainer, kill_at
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

from hookline.engine import TrainerBase
from hookline.hooks import CallbackHook, EvalHook, EventStorage, HookBase, PeriodicWriter, TensorboardXWriter


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


def shown(folder):
    """Steps by name, as TensorBoard shows them and as its older reader returns them."""
    plugin = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    older = event_accumulator.EventAccumulator(str(folder), dict.fromkeys(("scalars", "images", "histograms"), 0))
    for events in (plugin, older):
        events.Reload()
    tensors = {tag: [event.step for event in plugin.Tensors(tag)] for tag in plugin.Tags()["tensors"]}
    for kind, read in {"scalars": older.Scalars, "images": older.Images, "histograms": older.Histograms}.items():
        for tag in older.Tags()[kind]:
            assert [event.step for event in read(tag)] == tensors[tag]
    return tensors


def put_media(trainer):
    if trainer.iter % 3 == 0:
        storage = trainer.storage
        storage.put_image("image", torch.full((3, 4, 4), trainer.iter / 100))
        storage.put_histogram("histogram", torch.arange(10.0))
        storage.put_text("text", "hello")


def put_late_media(trainer):
    if trainer.iter == 15:
        put_media(trainer)


class Kill(HookBase):
    """Copies the folder and the last saved state at the end of iterations, as after a kill."""

    def __init__(self, folder, saved_at, at):
        self.folder, self.saved_at, self.at = folder, saved_at, at
        self.kills, self.state = {}, None

    def after_step(self):
        if self.trainer.iter in (self.saved_at, *self.at):
            self.trainer.request_save()

    def on_save(self):
        self.trainer.emit("before_save", "checkpoint")
        iteration = self.trainer.iter
        if iteration == self.saved_at:
            self.state = copy.deepcopy(self.trainer.state_dict())
        if iteration in self.at:
            folder = self.folder.parent / f"killed{iteration}"
            shutil.copytree(self.folder, folder)
            self.kills[iteration] = (folder, self.state)


def run(folder, start=0, stop=40, hooks=(), state=None):
    trainer = Losses()
    media = [CallbackHook(after_step=put_media), CallbackHook(on_save=put_late_media)]
    trainer.register_hooks([*media, *hooks, PeriodicWriter([TensorboardXWriter(output_dir=str(folder))], 10)])
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(start, stop)
    return shown(folder)


def test_media_not_written_before_a_kill_are_shown_once(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15, 24, 33))
    whole = run(tmp_path / "whole", hooks=[kill])
    assert whole["image"].count(12) == 1
    for folder, state in kill.kills.values():
        assert run(folder, 16, state=state, hooks=[Kill(folder, 0, ())]) == whole


@pytest.mark.parametrize("at", [5, 15, 30])
def test_points_of_a_run_killed_before_its_first_checkpoint_are_shown_once(tmp_path, at):
    kill = Kill(tmp_path / "whole", 100, (at,))
    run(tmp_path / "whole", hooks=[kill])
    again = run(kill.kills[at][0])
    assert again == run(tmp_path / "alone")


def test_files_are_read_in_the_order_of_the_runs_even_if_a_clock_was_ahead(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15,))
    whole = run(tmp_path / "whole", hooks=[kill])
    folder, state = kill.kills[15]
    [name] = os.listdir(folder)
    stamp = name.split(".")[3]
    os.rename(folder / name, folder / name.replace(stamp, f"{int(time.time()) + 3600:010d}"))
    assert run(folder, 16, state=state, hooks=[Kill(folder, 0, ())]) == whole


def test_a_state_saved_before_the_first_write_of_a_resumed_run_includes_the_media(tmp_path):
    kill = Kill(tmp_path / "whole", 15, (15,))
    run(tmp_path / "whole", hooks=[kill])
    folder, state = kill.kills[15]
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([TensorboardXWriter(output_dir=str(folder))], 10)])
    trainer.load_state_dict(state)
    trainer.register_hooks([again := Kill(folder, 16, ())])
    trainer.train(16, 18)
    assert [iteration for _, _, iteration in again.state["storage"]["images"]] == [12, 15, 15]


# ---------------------------------------------------------------------- names, config and charts


def events_of(folder):
    return event_accumulator.EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()


def curves(folder):
    events = events_of(folder)
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def text_steps(folder):
    return [event.step for event in events_of(folder).Tensors("config/text_summary")]


RUN = (
    *("LOG.WRITERS", ["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"], "LOG.PERIOD", 4),
    *("SOLVER.MAX_ITER", 10, "SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 5, "LOG.PROGRESS_BAR", False),
)


def test_a_run_has_the_groups_train_perf_and_eval(tmp_path):
    config_trainer(tmp_path, *RUN, "HOOKS", [{"NAME": "Throughput"}, {"NAME": "MemoryMonitor"}]).train()
    found = curves(tmp_path)
    assert {"train/loss", "train/lr", "train/epoch", "perf/data_time", "perf/samples_per_s", "perf/rss_mem"} <= set(
        found
    )
    assert found["eval/synthetic/accuracy"] == found["eval/synthetic/loss"] == [4, 10]
    assert {tag.split("/")[0] for tag in found} == {"train", "perf", "eval"}
    assert not any("eta" in tag or "total_loss" in tag for tag in found)
    row = json.loads((tmp_path / "metrics.json").read_text().splitlines()[-2])
    assert {"total_loss", "loss", "data_time"} <= row.keys()


def put(names, groups=True, folder=None):
    writer = TensorboardXWriter(str(folder), groups=groups)
    with EventStorage(1) as storage:
        storage.put_scalars(**names)
        storage.put_scalar("eta_seconds", 5.0, smoothing_hint=False)
        writer.write()
    writer.close()
    return set(curves(folder))


def test_the_total_of_several_losses_is_written(tmp_path):
    several = {"loss_box": 1.0, "loss_cls": 2.0, "total_loss": 3.0}
    assert put(several, folder=tmp_path) == {"train/loss_box", "train/loss_cls", "train/total_loss"}


def test_a_total_that_differs_from_the_only_loss_is_written(tmp_path):
    assert put({"loss": 1.0, "total_loss": 3.0}, folder=tmp_path) == {"train/loss", "train/total_loss"}


def test_names_with_a_slash_stay_as_they_are(tmp_path):
    assert put({"weights/norm": 1.0, "train/accuracy": 0.5}, folder=tmp_path) == {"weights/norm", "train/accuracy"}


def test_without_groups_names_are_those_of_metrics_json(tmp_path):
    metrics = {"loss": 1.0, "total_loss": 1.0, "time": 2.0}
    assert put(metrics, groups=False, folder=tmp_path) == {*metrics, "eta_seconds"}


def test_the_names_of_metrics_json_can_be_configured(tmp_path):
    writers = [{"NAME": "TensorboardXWriter", "ARGS": {"groups": False}}]
    config_trainer(tmp_path, *RUN, "LOG.WRITERS", writers).train()
    assert {"loss", "total_loss", "synthetic/accuracy"} <= set(curves(tmp_path))


def test_results_evaluated_before_a_resume_keep_their_group(tmp_path):
    """The checkpoint at 7 has the results of the evaluation at 5, which are written at 9."""
    states = []

    def start(state=None, first=0, end=8):
        trainer = Losses()
        save = CallbackHook(before_step=lambda trainer: states.append(trainer.state_dict()))
        evaluate = EvalHook(6, lambda: {"digits": {"accuracy": 1.0}}, eval_after_train=False)
        trainer.register_hooks([save, evaluate, PeriodicWriter([TensorboardXWriter(output_dir=str(tmp_path))], 10)])
        if state:
            trainer.load_state_dict(state)
        trainer.train(first, end)

    start()
    start(copy.deepcopy(states[7]), 7, 10)
    assert curves(tmp_path) == {"train/loss": [9], "eval/digits/accuracy": [5]}


def test_config_and_charts_are_written_once(tmp_path):
    trainer = config_trainer(tmp_path, *RUN)
    kill_at(trainer, 8)
    config_trainer(tmp_path, *RUN, resume=True).train()
    assert text_steps(tmp_path) == [0]
    events = events_of(tmp_path)
    assert [event.step for event in events.Tensors("custom_scalars__config__")] == [0]
    [text] = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    assert "\n      MAX_ITER: 10\n" in text.decode()
    found = curves(tmp_path)
    assert (found["train/loss"], found["eval/synthetic/accuracy"]) == ([3, 7, 9], [4, 10])


def test_hyperparameters_and_charts_are_in_the_form_that_tensorboards_pages_read(tmp_path):
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import metadata

    config_trainer(tmp_path, *RUN).train()
    events = events_of(tmp_path)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    assert hparams["SOLVER.BASE_LR"].number_value == 0.1
    assert hparams["MODEL.NAME"].string_value == "ConvNet"
    [layout] = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    charts = layout_pb2.Layout.FromString(layout).category[0].chart
    patterns = charts[0].multiline.tag
    shown = [tag for tag in curves(tmp_path) if any(re.search(pattern, tag) for pattern in patterns)]
    assert sorted(shown) == ["eval/synthetic/loss", "train/loss"]
