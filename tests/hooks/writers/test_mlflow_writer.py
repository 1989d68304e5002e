"""Runs of MLflow in a local folder and in a database, read by its client."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import config_trainer, kill_at

from hookline.hooks import CallbackHook

mlflow = pytest.importorskip("mlflow")

RUN = (
    *("LOG.PERIOD", 4, "LOG.PROGRESS_BAR", False, "SOLVER.MAX_ITER", 10, "SOLVER.CHECKPOINT_PERIOD", 3),
    *("TEST.EVAL_PERIOD", 5, "CHECKPOINT.BEST.METRIC", "synthetic/accuracy"),
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database
    yield (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(None)


def writers(store, **arguments):
    arguments = {"experiment": "demo", "tracking_uri": store, **arguments}
    return "LOG.WRITERS", ["JSONWriter", {"NAME": "MLflowWriter", "ARGS": arguments}]


class Found:
    """The only run of the experiment "demo"."""

    def __init__(self, store):
        self.client = mlflow.MlflowClient(store)
        experiment = self.client.get_experiment_by_name("demo")
        [self.run] = self.client.search_runs([experiment.experiment_id])
        self.id, self.status = self.run.info.run_id, self.run.info.status

    def steps(self, name):
        return [metric.step for metric in self.client.get_metric_history(self.id, name)]

    def artifacts(self, folder=None):
        return sorted(Path(entry.path).name for entry in self.client.list_artifacts(self.id, folder))


def media(trainer):
    if trainer.iter == 2:
        trainer.storage.put_image("samples", torch.rand(3, 8, 8))
        trainer.storage.put_text("note", "a < b")
        trainer.storage.put_scalar("[metric]own", 1.0)  # a name with characters that MLflow refuses


def test_a_run_has_parameters_metrics_media_and_the_best_checkpoint(tmp_path, store):
    trainer = config_trainer(tmp_path / "digits", *RUN, *writers(store, upload_best=True, tags={"team": "vision"}))
    trainer.register_hooks([CallbackHook(after_step=media)])
    trainer.train()
    found = Found(store)
    assert (found.run.info.run_name, found.status) == ("digits", "FINISHED")
    assert found.run.data.tags["team"] == "vision"
    assert found.run.data.params["SOLVER.BASE_LR"] == "0.1"
    assert found.steps("train/loss") == [3, 7, 9]
    assert found.steps("eval/synthetic/accuracy") == [4, 10]
    assert found.steps("train/_metric_own") == [2]
    assert found.artifacts() == ["images", "model_best.pth", "texts"]
    assert found.artifacts("texts/note") == ["0000002.txt"]
    assert mlflow.active_run() is None


def test_a_resumed_run_is_the_same_run_with_each_iteration_once(tmp_path, store):
    kill_at(config_trainer(tmp_path, *RUN, *writers(store)), 8)
    assert Found(store).status == "FAILED"
    config_trainer(tmp_path, *RUN, *writers(store), "SOLVER.MAX_ITER", 12, resume=True).train()
    found = Found(store)
    assert found.status == "FINISHED"
    assert found.steps("train/loss") == [3, 7, 11]
    assert found.run.data.params["SOLVER.MAX_ITER"] == "10"
    assert found.run.data.tags["resumed.SOLVER.MAX_ITER"] == "12"


def test_an_interrupted_run_is_killed_in_mlflow(tmp_path, store):
    trainer = config_trainer(tmp_path, *RUN, *writers(store))
    stop = CallbackHook(after_step=lambda t: t.request_stop("signal", exit_code=130) if t.iter == 3 else None)
    trainer.register_hooks([stop])
    trainer.train()
    assert Found(store).status == "KILLED"


def test_own_calls_go_to_the_run_and_an_active_run_is_used(tmp_path, store):
    def own(trainer):
        mlflow.log_metric("own", 1.0, step=trainer.iter)

    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("demo")
    with mlflow.start_run() as run:
        trainer = config_trainer(tmp_path, *RUN, *writers(store))
        trainer.register_hooks([CallbackHook(after_step=own)])
        trainer.train()
        assert mlflow.active_run().info.run_id == run.info.run_id
    found = Found(store)
    assert found.id == run.info.run_id
    assert found.steps("own") == list(range(10))
    assert found.steps("train/loss") == [3, 7, 9]


@pytest.mark.slow
def test_runs_go_to_a_database(tmp_path):
    pytest.importorskip("sqlalchemy")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    config_trainer(tmp_path / "run", *RUN, *writers(store)).train()
    config_trainer(tmp_path / "run", *RUN, *writers(store), "SOLVER.MAX_ITER", 12, resume=True).train()
    found = Found(store)
    assert found.status == "FINISHED"
    assert found.steps("train/loss") == [3, 7, 9, 11]


PROGRAM = """
import sys, time
sys.path[:0] = {helpers}
from small_runs import config_trainer
from hookline.hooks import CallbackHook
trainer = config_trainer({folder!r}, *{overrides!r}, resume={resume})
if not {resume}:
    def wait(trainer):
        if trainer.iter == 5:
            time.sleep(1.5)  # until rows are delivered
            print("ready", flush=True)
            time.sleep(60)
    trainer.register_hooks([CallbackHook(before_step=wait)])
trainer.train()
"""


@pytest.mark.slow
def test_a_run_killed_by_sigkill_before_its_first_checkpoint_continues_as_the_same_run(tmp_path, store):
    overrides = (*RUN, *writers(store), "SOLVER.MAX_ITER", 20, "SOLVER.CHECKPOINT_PERIOD", 7)
    helpers = [path for path in sys.path if path.endswith("helpers")]

    def start(resume):
        program = PROGRAM.format(helpers=helpers, folder=str(tmp_path / "run"), overrides=overrides, resume=resume)
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    process = start(False)
    assert any("ready" in line for line in process.stdout)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = Found(store)
    assert before.status == "RUNNING"
    assert start(True).wait(120) == 0
    found = Found(store)
    assert (found.id, found.status) == (before.id, "FINISHED")
    assert found.steps("train/loss") == [3, 7, 11, 15, 19]
    assert found.steps("eval/synthetic/accuracy") == [4, 9, 14, 20]
