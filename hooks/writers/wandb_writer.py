"""Weights & Biases."""

import html
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...config import ConfigError
from ...config.files.run_folder import claim
from .base import WRITER_REGISTRY, EndOfRun
from .tracker import TrackerWriter

__all__ = ["WandbWriter"]

_OFFLINE = '; to train without an account, set mode: "offline" or the environment variable WANDB_MODE=offline'


@WRITER_REGISTRY.register()
class WandbWriter(TrackerWriter):
    """Writes a run to Weights & Biases (https://wandb.ai): metrics, images, histograms, texts and the config.

    The horizontal axis of charts is ``iteration``. If a run of wandb is active when training begins, it is used, and
    not finished at the end. ``wandb.run`` is the run, for code of your own.

    Args:
        project: the project. Default: the environment variable ``WANDB_PROJECT``, or wandb's default.
        name: name of the run. Default: that of its folder.
        mode: "online", "offline" (writes to ``<output_dir>/wandb``, for ``wandb sync``) or "disabled". Default: the
            environment variable ``WANDB_MODE``, or "online".
        entity: the user or team.
        group: name for runs that belong together.
        job_type: kind of the run, such as "train".
        tags: tags of the run.
        notes: a longer description.
        settings: further settings: arguments of ``wandb.Settings``.
        run_id, upload_best, groups, cfg, output_dir, window_size: see :class:`TrackerWriter`.

    Raises:
        ConfigError: wandb or Pillow is not installed; or wandb has no API key and no terminal to ask for one. When
            training begins: wandb refuses an argument.
    """

    packages = ("wandb", "PIL")
    extra = "wandb"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        settings: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        upload_best: bool = False,
        groups: bool = True,
        cfg: Mapping[str, Any] | None = None,
        output_dir: str = ".",
        window_size: int = 20,
    ) -> None:
        super().__init__(cfg, output_dir, window_size, groups, run_id, upload_best)
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f'WandbWriter: mode must be "online", "offline" or "disabled", not {mode!r}')
        self._mode = mode or os.environ.get("WANDB_MODE", "online")
        if self._mode == "online" and _has_no_key():
            raise ConfigError(f"WandbWriter: no API key is configured: run `wandb login`{_OFFLINE}")
        self._options = {
            "project": project,
            "name": name or self._folder_name,
            "entity": entity,
            "group": group,
            "job_type": job_type,
            "tags": list(tags) or None,
            "notes": notes,
        }
        self._settings = dict(settings or {})
        self._wandb: Any = None
        self._run: Any = None
        self._is_ours = True

    def start(self, run_id: str | None) -> str:
        self._wandb = wandb = importlib.import_module("wandb")
        self._is_ours = wandb.run is None
        self._run = self._new_run(run_id) if wandb.run is None else wandb.run
        self._run.config.update(self.config, allow_val_change=True)
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")
        return str(self._run.id)

    def _new_run(self, run_id: str | None) -> Any:
        wandb = self._wandb
        os.makedirs(self.output_dir, exist_ok=True)
        if not os.path.exists(folder := os.path.join(self.output_dir, "wandb")):
            claim(folder)
        try:
            return wandb.init(
                **self._options,
                id=run_id,
                resume="allow"
                if run_id and self._mode == "online"
                else None,  # an offline run continues by its id alone
                mode=self._mode,
                dir=self.output_dir,
                settings=wandb.Settings(**self._settings),
            )
        except (wandb.errors.UsageError, TypeError, ValueError) as error:
            raise ConfigError(f"WandbWriter: {str(error).rstrip('.')}{_OFFLINE}") from error

    def log(self, iteration: int, values: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **values})

    def log_image(self, iteration: int, name: str, image: Any) -> None:
        self._run.log({"iteration": iteration, name: self._wandb.Image(image)})

    def log_histogram(self, iteration: int, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        histogram = self._wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))
        self._run.log({"iteration": iteration, name: histogram})

    def log_text(self, iteration: int, name: str, text: str) -> None:
        self._run.log({"iteration": iteration, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def upload(self, path: str) -> None:
        artifact = self._wandb.Artifact(f"model-{self.run_id}", type="model")
        (artifact.add_dir if os.path.isdir(path) else artifact.add_file)(path)
        self._run.log_artifact(artifact, aliases=["best"])

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
