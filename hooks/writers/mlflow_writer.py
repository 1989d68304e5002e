"""MLflow."""

import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from .base import WRITER_REGISTRY, EndOfRun
from .hyperparameters import flatten
from .tracker import TrackerWriter

__all__ = ["MLflowWriter"]

_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# Limits of MLflow's servers: characters of a parameter, and parameters in one request.
_LONGEST_VALUE = 6000
_MOST_PARAMETERS = 100


@WRITER_REGISTRY.register()
class MLflowWriter(TrackerWriter):
    """Writes a run to MLflow (https://mlflow.org): metrics, images, texts and the config. Histograms are left out.

    If a run of MLflow is active when training begins, it is used, and not ended. Otherwise the writer's run is the
    active one during training, for calls like ``mlflow.log_metric`` of your own.

    MLflow does not let a parameter change. If a resumed run has another value of a key, that is the tag
    ``resumed.<key>``.

    Args:
        experiment: name of the experiment. Default: the environment variable ``MLFLOW_EXPERIMENT_NAME``, or "Default".
        name: name of the run. Default: that of its folder.
        tracking_uri: a server (``http://host:5000``), a database (``sqlite:///mlflow.db``) or a folder. Default: the
            environment variable ``MLFLOW_TRACKING_URI``, or MLflow's default.
        tags: tags of the run.
        run_id, upload_best, groups, cfg, output_dir, window_size: see :class:`TrackerWriter`.

    Raises:
        ConfigError: MLflow or Pillow is not installed.
    """

    packages = ("mlflow", "PIL")
    extra = "mlflow"

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        run_id: str | None = None,
        upload_best: bool = False,
        groups: bool = True,
        cfg: Mapping[str, Any] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
    ) -> None:
        super().__init__(cfg, output_dir, window_size, groups, run_id, upload_best)
        self._experiment = experiment
        self._name = name or self._folder_name
        self._uri = tracking_uri
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        self._mlflow: Any = None
        self._client: Any = None
        self._is_ours = True

    def start(self, run_id: str | None) -> str:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        if self._uri is not None:
            mlflow.set_tracking_uri(self._uri)
        run = mlflow.active_run()
        self._is_ours = run is None
        if run is None:
            if self._experiment is not None:
                mlflow.set_experiment(self._experiment)
            run = mlflow.start_run(run_id=run_id, run_name=None if run_id else self._name, tags=self._tags or None)
        self._client = mlflow.MlflowClient()
        self._log_config(run.info.run_id)
        return str(run.info.run_id)

    def _log_config(self, run_id: str) -> None:
        new = {_valid(key): str(value)[:_LONGEST_VALUE] for key, value in flatten(self.config).items()}
        there = self._client.get_run(run_id).data.params
        params = [self._mlflow.entities.Param(key, value) for key, value in new.items() if key not in there]
        for first in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMETERS])
        for key in new.keys() & there.keys():
            if new[key] != there[key]:
                self._client.set_tag(run_id, f"resumed.{key}", new[key])

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        metrics = [metric(_valid(name), value, now, iteration) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_image(self, iteration: int, name: str, image: Any) -> None:
        self._client.log_image(self.run_id, image, key=_valid(name), step=iteration)

    def log_text(self, iteration: int, name: str, text: str) -> None:
        self._client.log_text(self.run_id, text, f"texts/{_valid(name)}/{iteration:07d}.txt")

    def upload(self, path: str) -> None:
        if os.path.isdir(path):
            self._client.log_artifacts(self.run_id, path, os.path.basename(path))
        else:
            self._client.log_artifact(self.run_id, path)

    def end(self, how: EndOfRun) -> None:
        if not self._is_ours:
            return
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self.run_id:
            self._mlflow.end_run(_STATUS[how])
        else:  # started on another thread, or ended by other code
            self._client.set_terminated(self.run_id, _STATUS[how])


def _valid(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
