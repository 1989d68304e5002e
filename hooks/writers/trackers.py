"""Experiment trackers: Weights & Biases, MLflow, and what writers to trackers have in common."""

import errno
import html
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from ...config import ConfigError
from ...config.atomic import WriteError, replace_text
from ...config.errors import first_line, suggest
from ..common import preserve_rng
from .base import WRITER_REGISTRY, EndOfRun, MediaWriter
from .tensorboard import flatten, plain

logger = logging.getLogger(__name__)

_OFFLINE = '; to train without an account, set mode: "offline" or the environment variable WANDB_MODE=offline'
_MLFLOW_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class TrackerError(WriteError):
    """A tracker could not be written to."""

    def __init__(self, writer: "TrackerWriter", cause: BaseException) -> None:
        super().__init__(errno.EIO, f"{type(cause).__name__}: {first_line(cause)}", type(writer).__name__)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror} (metrics.json is not affected; see CHECKPOINT.ON_ERROR)"


class TrackerWriter(MediaWriter):
    """Writes a run to an experiment tracker. A subclass defines :meth:`start`, :meth:`log` and :meth:`end`. It may
    define ``log_image(iteration, name, image)``, which gets a uint8 array of shape (H, W, 3) or (H, W), and
    ``log_text(iteration, name, text)``.

    Any error of the tracker is handled like that of a file that cannot be written: ``CHECKPOINT.ON_ERROR`` decides.
    Histograms are not sent.

    A resumed run continues the tracker's run. Its id is in a file in the run's folder, with the last iteration that the
    tracker has; that and earlier ones are not sent again.

    Args:
        cfg: the config, or any dict of hyperparameters.
        output_dir: the run's folder.
        window_size: see :class:`RowWriter`.

    Raises:
        ConfigError: a package is not installed.
    """

    packages: tuple[str, ...] = ()
    """Modules that must be installed."""
    extra = ""
    """Name of hookline's extra that installs them."""

    def __init__(
        self,
        cfg: Mapping[str, object] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
    ) -> None:
        super().__init__(window_size)
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                install = f"pip install 'hookline[{self.extra}]'"
                raise ConfigError(f"{type(self).__name__} needs {package}, which is not installed: {install}")
        self.config = plain(cfg or {})
        self.output_dir = output_dir
        # Names the tracker's run if no name is given.
        self._folder_name = os.path.basename(os.path.abspath(output_dir)) if output_dir != "." else None
        self.run_id: str | None = None
        self._started = False
        self._sent = self._skip_until = -1  # the last iteration that the tracker has, and has from an earlier process

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def start(self, run_id: str | None) -> str:
        """Start a run of the tracker, or continue ``run_id``, and write :attr:`config` as its hyperparameters.

        Returns:
            The run's id.
        """

    @abstractmethod
    def end(self, how: EndOfRun) -> None:
        """End the tracker's run."""

    # ------------------------------------------------------------------ the run

    def resume(self, start_iter: int) -> None:
        super().resume(start_iter)
        # At 0 in a run's folder: a run that was killed before its first checkpoint, since a new one moves the record
        # away. Elsewhere: a new run.
        self.run_id, self._sent = self._read_record()
        if not start_iter and not os.path.exists(os.path.join(self.output_dir, "config.yaml")):
            self.run_id, self._sent = None, -1
        self._skip_until = self._sent
        with preserve_rng():
            try:
                self._start()
            except WriteError as error:
                logger.error("The first write tries again: %s", error)

    def _start(self) -> None:
        if not self._started:
            with self._errors():
                self.run_id = self.start(self.run_id)
            self._started = True
            self._write_record()

    def deliver(self) -> None:
        if not self._waiting:
            return
        self._start()
        try:
            super().deliver()
        finally:
            self._write_record()

    def send(self, log: Callable[..., None], iteration: int, *values: object) -> None:
        if iteration <= self._skip_until:
            return
        if log == self.log_image:
            values = values[0], _pixels(values[1])
        with self._errors():
            log(iteration, *values)
        self._sent = max(self._sent, iteration)

    def finish(self, how: EndOfRun) -> None:
        if not self._started:
            return
        self._started = False
        with self._errors():
            self.end(how)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn any error of the tracker into a :class:`TrackerError`."""
        try:
            yield
        except (ConfigError, WriteError):
            raise
        except Exception as error:
            raise TrackerError(self, error) from error

    @property
    def _record_path(self) -> str:
        # By this name a new run recognizes it, and moves it away with the earlier run.
        name = self.extra or type(self).__name__.removesuffix("Writer") + "Writer"
        return os.path.join(self.output_dir, f"{name}_run.json")

    def _read_record(self) -> tuple[str | None, int]:
        """Return what :meth:`_write_record` wrote; None and -1 if there is none."""
        if not os.path.exists(self._record_path):
            return None, -1
        try:
            with open(self._record_path, encoding="utf-8") as file:
                record = json.load(file)
            return record["run_id"], int(record["sent"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._record_path} is no record of a tracker's run: move it away") from error

    def _write_record(self) -> None:
        os.makedirs(self.output_dir, exist_ok=True)
        replace_text(self._record_path, json.dumps({"run_id": self.run_id, "sent": self._sent}) + "\n")


def _pixels(image: Any) -> Any:
    """Return a (3, H, W) or (1, H, W) tensor, uint8 or float in [0, 1], as an array; see ``log_image``."""
    image = image.cpu()
    if image.dtype.is_floating_point:
        image = (image.float().clamp(0, 1) * 255).round()
    array = image.byte().numpy()
    return array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)


@WRITER_REGISTRY.register()
class WandbWriter(TrackerWriter):
    """Writes a run to Weights & Biases (https://wandb.ai): metrics, images, texts and the config.

    The horizontal axis of charts is ``iteration``. If a run of wandb is active when training begins, it is used, and
    not finished at the end. ``wandb.run`` is the run, for code of your own.

    Args:
        project: the project. Default: the environment variable ``WANDB_PROJECT``, or wandb's default.
        name: name of the run. Default: that of its folder.
        mode: "online", "offline" (writes to ``<output_dir>/wandb``, for ``wandb sync``) or "disabled". Default: the
            environment variable ``WANDB_MODE``, or "online".
        init: further arguments of ``wandb.init``, such as ``{"entity": "team", "group": "sweep", "tags": ["a"]}``.
        cfg, output_dir, window_size: see :class:`TrackerWriter`.

    Raises:
        ConfigError: wandb or Pillow is not installed; or wandb has no API key and no terminal to ask for one. When
            training begins: wandb refuses an argument or its value.
    """

    packages = ("wandb", "PIL")
    extra = "wandb"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        init: Mapping[str, object] | None = None,
        cfg: Mapping[str, object] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
    ) -> None:
        super().__init__(cfg, output_dir, window_size)
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f'WandbWriter: mode must be "online", "offline" or "disabled", not {mode!r}')
        mode = mode or os.environ.get("WANDB_MODE", "online")  # type: ignore[assignment]
        if mode == "online" and _has_no_key():
            raise ConfigError(f"WandbWriter: no API key is configured: run `wandb login`{_OFFLINE}")
        options = {"project": project, "name": name or self._folder_name, "mode": mode, **(init or {})}
        if init:
            parameters = inspect.signature(importlib.import_module("wandb").init).parameters
            if unknown := set(init) - set(parameters):
                hint = suggest(min(unknown), parameters)
                raise ConfigError(f"WandbWriter: wandb.init has no argument {min(unknown)!r}{hint}")
        self._options: dict[str, object] = options
        self._wandb: Any = None
        self._run: Any = None
        self._is_ours = True

    def start(self, run_id: str | None) -> str:
        self._wandb = wandb = importlib.import_module("wandb")
        self._is_ours = wandb.run is None
        if self._is_ours:
            os.makedirs(self.output_dir, exist_ok=True)
            # An offline run continues by its id alone.
            resume = "allow" if run_id and self._options["mode"] == "online" else None
            try:
                wandb.init(**{"dir": self.output_dir, **self._options}, id=run_id, resume=resume)
            except (wandb.errors.UsageError, TypeError, ValueError) as error:
                raise ConfigError(f"WandbWriter: {str(error).rstrip('.')}{_OFFLINE}") from error
        self._run = wandb.run
        self._run.config.update(self.config, allow_val_change=True)
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")
        return str(self._run.id)

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **values})

    def log_image(self, iteration: int, name: str, image: Any) -> None:
        self._run.log({"iteration": iteration, name: self._wandb.Image(image)})

    def log_text(self, iteration: int, name: str, text: str) -> None:
        self._run.log({"iteration": iteration, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def end(self, how: EndOfRun) -> None:
        if not self._is_ours:
            return
        if how == "interrupted":
            self._run.mark_preempting()  # the page shows "preempted"
        self._run.finish(exit_code=0 if how in ("completed", "stopped") else 1)


def _has_no_key() -> bool:
    """Whether it is certain, without asking wandb, that no API key is configured."""
    if "wandb" in sys.modules or "ipykernel" in sys.modules or (sys.stdin and sys.stdin.isatty()):
        return False  # a script may have logged in; a notebook or terminal asks
    places = ("~/.netrc", "~/_netrc", "~/.config/wandb", "secrets.env", os.environ.get("NETRC", ""))
    if any(os.path.exists(os.path.expanduser(place)) for place in places):
        return False
    return not any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))


@WRITER_REGISTRY.register()
class MLflowWriter(TrackerWriter):
    """Writes a run to MLflow (https://mlflow.org): metrics, images, texts and the config.

    If a run of MLflow is active when training begins, it is used, and not ended. Otherwise the writer's run is the
    active one during training, for calls like ``mlflow.log_metric`` of your own.

    MLflow's thread sends the metrics, and a checkpoint and the end of the run wait for it.

    MLflow does not let a parameter change. If a resumed run has another value of a key, that is the tag
    ``resumed.<key>``.

    Args:
        experiment: name of the experiment. Default: the environment variable ``MLFLOW_EXPERIMENT_NAME``, or "Default".
        name: name of the run. Default: that of its folder.
        tracking_uri: a server (``http://host:5000``), a database (``sqlite:///mlflow.db``) or a folder. Default: the
            environment variable ``MLFLOW_TRACKING_URI``, or MLflow's default.
        tags: tags of the run.
        cfg, output_dir, window_size: see :class:`TrackerWriter`.

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
        cfg: Mapping[str, object] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
    ) -> None:
        super().__init__(cfg, output_dir, window_size)
        self._experiment = experiment
        self._name = name or self._folder_name
        self._uri = tracking_uri
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        self._mlflow: Any = None
        self._client: Any = None
        self._sending: list[Any] = []  # requests that MLflow's thread sends
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
        new = {_valid(key): str(value) for key, value in flatten(self.config).items()}
        there = self._client.get_run(run_id).data.params
        params = [self._mlflow.entities.Param(key, value) for key, value in new.items() if key not in there]
        self._client.log_batch(run_id, params=params)
        for key in new.keys() & there.keys():
            if new[key] != there[key]:
                self._client.set_tag(run_id, f"resumed.{key}", new[key])

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        metrics = [metric(_valid(name), value, now, iteration) for name, value in values.items()]
        self._sending.append(self._client.log_batch(self.run_id, metrics=metrics, synchronous=False))

    def sync(self) -> None:
        with self._errors():
            while self._sending:
                self._sending.pop(0).wait()

    def log_image(self, iteration: int, name: str, image: Any) -> None:
        self.sync()  # a folder is not read while it is written
        self._client.log_image(self.run_id, image, key=_valid(name), step=iteration)

    def log_text(self, iteration: int, name: str, text: str) -> None:
        self.sync()
        self._client.log_text(self.run_id, text, f"texts/{_valid(name)}/{iteration:07d}.txt")

    def end(self, how: EndOfRun) -> None:
        if self._is_ours:
            self._mlflow.end_run(_MLFLOW_STATUS[how])


def _valid(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
