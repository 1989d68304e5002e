"""What all trackers have in common, with one that keeps runs in memory."""

import contextlib
import threading
import time

import pytest
import torch
from small_runs import config_trainer, kill_at

from hookline.config import ConfigError
from hookline.engine import TrainerBase
from hookline.hooks import WRITER_REGISTRY, CallbackHook, EventStorage, PeriodicWriter, TrackerWriter
from hookline.hooks.writers.trackers import TrackerError


class Server:
    """Runs by id: their rows, media and ends."""

    def __init__(self):
        self.runs, self.calls, self.down = {}, 0, False
        self.slow = threading.Event()
        self.slow.set()

    def call(self):
        self.calls += 1
        self.slow.wait(20)
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
        run = SERVER.runs.setdefault(run_id, {"rows": [], "media": [], "uploads": [], "ends": [], "config": []})
        run["config"].append(self.config)
        return run_id

    def log(self, iteration, values):
        SERVER.call()
        SERVER.runs[self.run_id]["rows"].append((iteration, dict(values)))

    def log_image(self, iteration, name, image):
        SERVER.runs[self.run_id]["media"].append((iteration, name, image.shape, str(image.dtype)))

    def log_histogram(self, iteration, name, counts, edges):
        SERVER.runs[self.run_id]["media"].append((iteration, name, len(counts), len(edges), sum(counts)))

    def log_text(self, iteration, name, text):
        SERVER.runs[self.run_id]["media"].append((iteration, name, text))

    def upload(self, path):
        SERVER.runs[self.run_id]["uploads"].append(path)

    def end(self, how):
        SERVER.runs[self.run_id]["ends"].append(how)


class Losses(TrainerBase):
    def run_step(self):
        self.storage.put_scalar("loss", float(self.iter))


@pytest.fixture(autouse=True)
def no_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*hooks, steps=40, on_error="stop", **arguments):
    trainer = Losses()
    trainer.register_hooks([*hooks, PeriodicWriter([MemoryTracker(**arguments)], 10, on_error)])
    trainer.train(0, steps)


def the_run():
    [run] = SERVER.runs.values()
    return run


def test_a_run_is_started_logged_in_groups_and_ended():
    train(cfg={"lr": 0.1, "sizes": (1, 2), "net": torch.nn.ReLU}, steps=30)
    run = the_run()
    assert run["rows"] == [(9, {"train/loss": 4.5}), (19, {"train/loss": 9.5}), (29, {"train/loss": 19.5})]
    assert run["config"] == [{"lr": 0.1, "sizes": [1, 2], "net": str(torch.nn.ReLU)}]
    assert run["ends"] == ["completed"]


def test_names_of_metrics_json_can_be_kept():
    train(groups=False, steps=10)
    assert the_run()["rows"] == [(9, {"loss": 4.5})]


def test_images_histograms_and_texts_are_sent_once():
    def put(trainer):
        if trainer.iter == 3:
            trainer.storage.put_image("color", torch.rand(3, 4, 6))
            trainer.storage.put_image("gray", torch.zeros(1, 4, 6, dtype=torch.uint8))
            trainer.storage.put_histogram("weights", torch.arange(1000.0))
            trainer.storage.put_text("sample", "hello")

    train(CallbackHook(after_step=put))
    assert the_run()["media"] == [
        (3, "color", (4, 6, 3), "uint8"),
        (3, "gray", (4, 6), "uint8"),
        (3, "weights", 500, 501, 1000.0),
        (3, "sample", "hello"),
    ]


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda trainer: trainer.request_stop("enough"), "stopped"),
        (lambda trainer: trainer.request_stop("signal", exit_code=130), "interrupted"),
        (lambda trainer: 1 / 0, "failed"),
    ],
)
def test_the_tracker_is_told_how_the_run_ended(end, how):
    def at_5(trainer):
        if trainer.iter == 5:
            end(trainer)

    if how == "failed":
        with pytest.raises(ZeroDivisionError):
            train(CallbackHook(after_step=at_5))
    else:
        train(CallbackHook(after_step=at_5))
    assert the_run()["ends"] == [how]


# ---------------------------------------------------------------------- trouble


def test_steps_do_not_wait_for_a_tracker(server):
    def after_step(trainer):
        if trainer.iter == 10:
            server.slow.clear()
        if trainer.iter == 30:
            done.append(time.perf_counter() - start)
            server.slow.set()

    done = []
    start = time.perf_counter()
    train(CallbackHook(after_step=after_step))
    assert done[0] < 5  # the server would have answered after 20 s
    assert [iteration for iteration, _ in the_run()["rows"]] == [9, 19, 29, 39]


def outage(server, first, last):
    """The server is down from one iteration to another. Each write uses the thread."""

    def before_step(trainer):
        if trainer.iter % 10 == 2 and trainer.iter > 10:
            writer = trainer.find_hook(PeriodicWriter)
            with contextlib.suppress(Exception):  # it is raised at the next write
                writer._running.result()
            writer._next_use = 0.0
        server.down = first <= trainer.iter < last

    return CallbackHook(before_step=before_step)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_rows_that_failed_once_are_sent_later(server, on_error):
    train(outage(server, 13, 23), on_error=on_error)
    assert [iteration for iteration, _ in the_run()["rows"]] == [9, 19, 29, 39]
    assert the_run()["ends"] == ["completed"]


def test_a_tracker_that_stays_down_ends_the_run(server):
    with pytest.raises(TrackerError, match="MemoryTracker: RuntimeError: 503: service unavailable"):
        train(outage(server, 13, 1000), steps=100)
    assert the_run()["ends"] == ["failed"]


def test_a_run_that_continues_while_a_tracker_is_down_sends_all_rows_later(server, caplog):
    train(outage(server, 13, 63), steps=80, on_error="continue")
    assert "Training continues, and the rows wait in memory: MemoryTracker" in caplog.text
    assert [iteration for iteration, _ in the_run()["rows"]] == [9, 19, 29, 39, 49, 59, 69, 79]


def test_a_tracker_that_is_down_at_the_start_ends_the_run_or_not_as_configured(server, caplog):
    server.down = True
    with pytest.raises(TrackerError, match="503"):
        train(steps=5)
    train(outage(server, 0, 5), steps=10, on_error="continue")
    assert "Training continues: MemoryTracker" in caplog.text
    assert [iteration for iteration, _ in the_run()["rows"]] == [9]


# ---------------------------------------------------------------------- resume

RUN = (
    *("LOG.WRITERS", ["JSONWriter", "MemoryTracker"], "LOG.PERIOD", 4, "LOG.PROGRESS_BAR", False),
    *("SOLVER.MAX_ITER", 20, "TEST.EVAL_PERIOD", 5, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy"),
)


def iterations():
    return [iteration for iteration, _ in the_run()["rows"]]


@pytest.mark.parametrize("at", [5, 9, 17])
def test_a_resumed_run_continues_the_same_tracked_run_with_each_iteration_once(tmp_path, at):
    """At 5 there is no checkpoint yet, and only the file in the run's folder has the id."""
    config_trainer(tmp_path / "whole", *RUN).train()
    whole = iterations()
    SERVER.runs.clear()
    kill_at(config_trainer(tmp_path / "run", *RUN), at)
    config_trainer(tmp_path / "run", *RUN, resume=True).train()
    # The simulated kill writes its last step, which is off the schedule.
    assert [iteration for iteration in iterations() if iteration in whole or iteration != at - 1] == whole
    assert the_run()["ends"] == ["failed", "completed"]


def test_a_new_run_in_the_same_folder_is_a_new_tracked_run(tmp_path):
    for _ in range(2):
        config_trainer(tmp_path, *RUN).train()
    assert [run["ends"] for run in SERVER.runs.values()] == [["completed"]] * 2


def test_a_resume_outside_of_a_runs_folder_continues_the_same_tracked_run(tmp_path):
    for start, end in ((0, 20), (20, 40)):
        trainer = Losses()
        trainer.register_hooks([PeriodicWriter([MemoryTracker(output_dir=str(tmp_path))], 10)])
        trainer.train(start, end)
    assert iterations() == [9, 19, 29, 39]
    train(output_dir=str(tmp_path), steps=10)
    assert len(SERVER.runs) == 2


def test_a_file_of_the_user_is_kept(tmp_path, caplog):
    path = tmp_path / "MemoryTracker_run.json"
    path.write_text("mine")
    trainer = Losses()
    trainer.register_hooks([PeriodicWriter([MemoryTracker(output_dir=str(tmp_path))], 10)])
    trainer.train(0, 10)
    assert (tmp_path / "MemoryTracker_run.json.old").read_text() == "mine"
    assert "is no record of a run" in caplog.text


def test_a_given_run_id_is_used():
    train(run_id="mine", steps=10)
    assert list(SERVER.runs) == ["mine"]


def test_the_best_checkpoint_is_uploaded_at_the_end(tmp_path):
    writers = [{"NAME": "MemoryTracker", "ARGS": {"upload_best": True}}]
    config_trainer(tmp_path, *RUN, "LOG.WRITERS", writers).train()
    assert the_run()["uploads"] == [str(tmp_path / "model_best.pth")]
    with pytest.raises(ConfigError, match=r"needs CHECKPOINT\.BEST\.METRIC, which is empty"):
        config_trainer(tmp_path / "other", *RUN, "LOG.WRITERS", writers, "CHECKPOINT.BEST.METRIC", "")


def test_the_tracker_gets_the_full_config(tmp_path):
    config_trainer(tmp_path, *RUN).train()
    [config] = the_run()["config"]
    assert config["SOLVER"]["MAX_ITER"] == 20
    assert config["MODEL"]["ARGS"]["width"] == 2


def test_a_writer_used_without_a_trainer_writes_and_ends():
    writer = MemoryTracker()
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        writer.write()
        writer.close()
        writer.finish("completed")
    assert the_run() == {
        **{"rows": [(0, {"train/loss": 1.0})], "media": [], "uploads": [], "ends": ["completed"], "config": [{}]}
    }
