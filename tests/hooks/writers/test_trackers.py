"""What all trackers have in common, with one that keeps runs in memory."""

import contextlib

import pytest
import torch
from metric_runs import TRACKED, at, put_media, train_losses
from small_runs import config_trainer, kill_at

from hookline.config import ConfigError
from hookline.hooks import WRITER_REGISTRY, CallbackHook, PeriodicWriter, TrackerWriter
from hookline.hooks.writers.trackers import TrackerError


class Server:
    """Runs by id: their rows, media and ends."""

    def __init__(self):
        self.runs, self.down = {}, False

    def call(self):
        if self.down:
            raise RuntimeError("503: service unavailable")


SERVER = Server()


@pytest.fixture(autouse=True)
def server():
    SERVER.__init__()
    return SERVER


@WRITER_REGISTRY.register()
class MemoryTracker(TrackerWriter):
    def start(self, run_id):
        SERVER.call()
        run_id = run_id or f"run{len(SERVER.runs)}"
        run = SERVER.runs.setdefault(run_id, {"rows": [], "media": [], "ends": [], "config": []})
        run["config"].append(self.config)
        return run_id

    def log(self, iteration, values):
        SERVER.call()
        SERVER.runs[self.run_id]["rows"].append((iteration, dict(values)))

    def log_image(self, iteration, name, image):
        SERVER.runs[self.run_id]["media"].append((iteration, name, image.shape, str(image.dtype)))

    def log_text(self, iteration, name, text):
        SERVER.runs[self.run_id]["media"].append((iteration, name, text))

    def end(self, how):
        SERVER.runs[self.run_id]["ends"].append(how)


@pytest.fixture(autouse=True)
def no_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*hooks, steps=40, on_error="stop", **arguments):
    train_losses(*hooks, PeriodicWriter([MemoryTracker(**arguments)], 10, on_error), end=steps)


def the_run():
    [run] = SERVER.runs.values()
    return run


def iterations():
    return [iteration for iteration, _ in the_run()["rows"]]


def test_a_run_gets_the_config_rows_and_media_once_and_is_ended():
    train(at(3, put_media), cfg={"lr": 0.1, "sizes": (1, 2), "net": torch.nn.ReLU}, steps=30)
    assert the_run() == {
        "rows": [(9, {"train/loss": 4.5}), (19, {"train/loss": 9.5}), (29, {"train/loss": 19.5})],
        "media": [(3, "image", (4, 6, 3), "uint8"), (3, "gray", (4, 6), "uint8"), (3, "text", "a < b")],
        "config": [{"lr": 0.1, "sizes": [1, 2], "net": str(torch.nn.ReLU)}],
        "ends": ["completed"],
    }


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda trainer: trainer.request_stop("enough"), "stopped"),
        (lambda trainer: trainer.request_stop("signal", exit_code=130), "interrupted"),
        (lambda trainer: 1 / 0, "failed"),
    ],
)
def test_the_tracker_is_told_how_the_run_ended(end, how):
    with contextlib.suppress(ZeroDivisionError):
        train(at(5, end))
    assert the_run()["ends"] == [how]


def outage(server, first, last):
    """The server is down from one iteration to another. Each write sends."""

    def before_step(trainer):
        trainer.find_hook(PeriodicWriter)._next_write = 0.0
        server.down = first <= trainer.iter < last

    return CallbackHook(before_step=before_step)


def test_a_tracker_that_stays_down_ends_the_run(server):
    with pytest.raises(TrackerError, match=r"MemoryTracker: .*503"):
        train(outage(server, 13, 1000), steps=100)
    assert the_run()["ends"] == ["failed"]


def test_a_run_that_continues_while_a_tracker_is_down_sends_all_rows_later(server, caplog):
    train(outage(server, 13, 63), steps=80, on_error="continue")
    assert "Training continues, and rows wait in memory: MemoryTracker" in caplog.text
    assert iterations() == [9, 19, 29, 39, 49, 59, 69, 79]


RUN = (*TRACKED, "LOG.WRITERS", ["JSONWriter", "MemoryTracker"], "SOLVER.MAX_ITER", 20, "SOLVER.CHECKPOINT_PERIOD", 7)


def test_a_resumed_run_continues_its_tracked_run_and_a_new_run_begins_another(tmp_path):
    """At 5 there is no checkpoint yet, and only the file in the run's folder has the id."""
    for _ in range(2):
        config_trainer(tmp_path / "whole", *RUN).train()
    for run in SERVER.runs.values():
        [config] = run["config"]
        assert (config["SOLVER"]["MAX_ITER"], config["MODEL"]["ARGS"]["width"]) == (20, 2)
    assert [run["ends"] for run in SERVER.runs.values()] == [["completed"]] * 2
    SERVER.runs.popitem()
    whole = iterations()
    SERVER.runs.clear()
    for resume, killed_at in ((False, 5), (True, 17)):
        kill_at(config_trainer(tmp_path / "run", *RUN, resume=resume), killed_at)
    config_trainer(tmp_path / "run", *RUN, resume=True).train()
    # A simulated kill writes its last step, which is off the schedule.
    assert [iteration for iteration in iterations() if iteration in whole or iteration not in (4, 16)] == whole
    assert the_run()["ends"] == ["failed", "failed", "completed"]


def test_a_file_of_the_user_is_refused_and_kept(tmp_path):
    path = tmp_path / "MemoryTrackerWriter_run.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"MemoryTrackerWriter_run\.json"):
        train(output_dir=str(tmp_path), steps=10)
    assert path.read_text() == "mine"
