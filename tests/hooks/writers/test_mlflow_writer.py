"""Runs of MLflow in a local folder and in a database, read by its client."""

from pathlib import Path

import pytest
from metric_runs import TRACKED, at, put, put_media
from small_runs import config_trainer, kill_at

from hookline.hooks import CallbackHook

pytestmark = pytest.mark.slow


@pytest.fixture
def mlflow():
    return pytest.importorskip("mlflow")  # here, since it takes two seconds


@pytest.fixture
def store(tmp_path, monkeypatch, mlflow):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database
    yield (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(None)


def writers(store, **arguments):
    arguments = {"experiment": "demo", "tracking_uri": store, **arguments}
    return "LOG.WRITERS", ["JSONWriter", {"NAME": "MLflowWriter", "ARGS": arguments}]


class Found:
    """The only run of the experiment "demo"."""

    def __init__(self, store):
        from mlflow import MlflowClient

        self.client = MlflowClient(store)
        experiment = self.client.get_experiment_by_name("demo")
        [self.run] = self.client.search_runs([experiment.experiment_id])
        self.id, self.status = self.run.info.run_id, self.run.info.status

    def steps(self, name):
        """Sorted: rows are delivered by threads, so the history's order is not the order of the steps."""
        return sorted(metric.step for metric in self.client.get_metric_history(self.id, name))

    def artifacts(self, folder=None):
        return sorted(Path(entry.path).name for entry in self.client.list_artifacts(self.id, folder))


def test_a_run_has_parameters_metrics_and_media_and_a_resume_continues_it(tmp_path, store, mlflow):
    trainer = config_trainer(tmp_path / "digits", *TRACKED, *writers(store, tags={"team": "vision"}))
    refused = put("[metric]own", 2)  # a name with characters that MLflow refuses
    trainer.register_hooks([at(2, put_media), refused])
    kill_at(trainer, 8)
    first = Found(store)
    config_trainer(tmp_path / "digits", *TRACKED, *writers(store), "SOLVER.MAX_ITER", 12, resume=True).train()
    found = Found(store)
    assert (first.id, first.status) == (found.id, "FAILED")
    assert (found.run.info.run_name, found.status) == ("digits", "FINISHED")
    assert found.run.data.tags["team"] == "vision"
    assert found.run.data.params["SOLVER.BASE_LR"] == "0.1"
    assert found.run.data.params["SOLVER.MAX_ITER"] == "10"  # MLflow lets no parameter change
    assert found.run.data.tags["resumed.SOLVER.MAX_ITER"] == "12"
    assert found.steps("train/loss") == [3, 7, 11]
    assert found.steps("eval/synthetic/accuracy") == [4, 9, 12]
    assert found.steps("train/_metric_own") == [2]
    assert found.artifacts() == ["images", "texts"]
    assert found.artifacts("texts/text") == ["0000002.txt"]
    assert mlflow.active_run() is None


def test_an_active_run_is_used_and_not_ended_and_own_calls_go_to_it(tmp_path, store, mlflow):
    def own(trainer):
        mlflow.log_metric("own", 1.0, step=trainer.iter)
        if trainer.iter == 5:
            trainer.request_stop("enough")

    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("demo")
    with mlflow.start_run() as run:
        trainer = config_trainer(tmp_path, *TRACKED, *writers(store))
        trainer.register_hooks([CallbackHook(after_step=own)])
        trainer.train()
        assert mlflow.active_run().info.run_id == run.info.run_id
    found = Found(store)
    assert found.id == run.info.run_id
    assert found.steps("own") == list(range(6))
    assert found.steps("train/loss") == [3, 5]
