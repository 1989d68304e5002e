import json

import pytest
import torch
from metric_runs import TRACKED, at, put, put_media, write
from small_runs import config_trainer, kill_at
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from torch import nn

from hookline import Trainer
from hookline.hooks import EventStorage, TensorboardXWriter


@pytest.fixture(autouse=True)
def ordered_files(monkeypatch):
    """TensorBoard reads files in the order of their names: the second, and a number that is sorted as text."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


def events_of(folder):
    sizes = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    return event_accumulator.EventAccumulator(str(folder), sizes).Reload()


def shown(folder):
    """Steps by name, as TensorBoard shows them and as its older reader returns them."""
    plugin = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    older = events_of(folder)
    tensors = {tag: [event.step for event in plugin.Tensors(tag)] for tag in plugin.Tags()["tensors"]}
    for kind, read in {"scalars": older.Scalars, "images": older.Images, "histograms": older.Histograms}.items():
        for tag in older.Tags()[kind]:
            assert [event.step for event in read(tag)] == tensors[tag]
    return tensors


def hparams_of(folder):
    from tensorboard.plugins.hparams import metadata

    content = events_of(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return metadata.parse_session_start_info_plugin_data(content).hparams


def test_each_writer_gets_every_value_and_medium_once(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    writers = [TensorboardXWriter(str(folder)) for folder in folders]
    write(writers, 20, at(3, put_media), put("sparse", 7), put("end", event="after_train"))
    for folder in folders:
        found = shown(folder)
        assert [found[name] for name in ("train/sparse", "train/end")] == [[7], [50]]
        assert [found[name] for name in ("image", "histogram", "text/text_summary")] == [[3], [3], [3]]
        losses = [(event.step, event.value) for event in events_of(folder).Scalars("train/loss")]
        assert losses == [(19, 9.5), (39, 29.5), (49, 39.5)]


def test_events_are_in_the_file_at_once_and_code_of_the_user_writes_to_the_same_file(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    writer.resume(5)
    with EventStorage(7) as storage:
        storage.put_scalar("a", 1.0)
        writer.write()
        assert shown(tmp_path) == {"train/a": [7]}
    writer._writer.add_scalar("b", 2.0, 9)
    writer._writer.flush()
    assert shown(tmp_path) == {"train/a": [7], "b": [9]}
    assert len(list(tmp_path.iterdir())) == 1
    writer.close()


def test_after_a_resume_by_hand_each_point_is_shown_once(tmp_path):
    for start, end in ((0, 50), (30, 60)):
        write([TensorboardXWriter(str(tmp_path))], 10, at(start, put_media), start=start, end=end)
    found = shown(tmp_path)
    assert found["train/loss"] == [9, 19, 29, 39, 49, 59]
    assert found["image"] == found["histogram"] == found["text/text_summary"] == [0, 30]


RUN = (
    *(*TRACKED, "LOG.WRITERS", ["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"]),
    *("HOOKS", [{"NAME": "Throughput"}, {"NAME": "MemoryMonitor"}]),
)


def test_a_run_has_groups_of_metrics_its_config_and_its_hyperparameters_once(tmp_path):
    kill_at(config_trainer(tmp_path, *RUN), 8)
    config_trainer(tmp_path, *RUN, resume=True).train()
    events = events_of(tmp_path)
    found = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {"train/lr", "train/epoch", "perf/data_time", "perf/samples_per_s", "perf/rss_mem"} <= set(found)
    assert found["train/loss"] == [3, 7, 9]
    assert found["eval/synthetic/accuracy"] == found["eval/synthetic/loss"] == [4, 10]
    assert {tag.split("/")[0] for tag in found} == {"train", "perf", "eval"}
    assert not any("eta" in tag or "total_loss" in tag for tag in found)
    row = json.loads((tmp_path / "metrics.json").read_text().splitlines()[-2])
    assert {"total_loss", "loss", "data_time"} <= row.keys()  # without groups

    [text] = events.Tensors("config/text_summary")
    assert "\n      MAX_ITER: 10\n" in text.tensor_proto.string_val[0].decode()
    hparams = hparams_of(tmp_path)
    assert hparams["SOLVER.BASE_LR"].number_value == 0.1
    assert hparams["MODEL.NAME"].string_value == "ConvNet"
    assert not {*hparams} & {"SOLVER.GAMMA", "OUTPUT_DIR"}  # as the defaults have it; differs in each run


def test_hyperparameters_are_without_objects(tmp_path):
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    trainer = Trainer(
        nn.Linear(2, 2), data, loss=nn.CrossEntropyLoss(), lr=0.5, length=1, batch_size=2, output_dir=tmp_path
    )
    trainer.train()
    assert hparams_of(tmp_path)["SOLVER.BASE_LR"].number_value == 0.5
    assert "object" not in str(hparams_of(tmp_path))
