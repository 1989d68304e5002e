"""Predicts with a trained model."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from ...config import CfgNode, ConfigError
from ...hooks.fvcore_adapter import checked
from ..checkpoint import Checkpointer
from ..data.build import build_collate_fn
from ..data.loader import move_to_device
from ..evaluation.evaluator import Batch, Outputs, inference_context
from ..modeling import build_adapter, build_model, resolve_device
from ..modeling.outputs import entries_of


def load_weights(
    cfg: CfgNode, model: nn.Module, resume: bool | str = False, kind: type[Checkpointer] = Checkpointer
) -> dict[str, Any]:
    """Load MODEL.WEIGHTS, or with ``resume`` the last or the named checkpoint's weights, and return its rest.

    Raises:
        ConfigError: there are none, they cannot be read, or they are of another model.
    """
    checkpointer = checked(kind(model, cfg.OUTPUT_DIR if resume else ""))
    rest = checkpointer.resume_or_load(
        "" if resume else cfg.MODEL.WEIGHTS,
        resume=resume,
        strict=cfg.MODEL.WEIGHTS_STRICT,
        weights_from=cfg.MODEL.WEIGHTS_FROM,
    )
    if resume and not checkpointer.resumed_from:
        raise ConfigError(
            f"OUTPUT_DIR: there is no complete checkpoint in {cfg.OUTPUT_DIR}; copies of the best do not count"
        )
    report = getattr(checkpointer, "load_report", None)  # fvcore's only logs them
    if report is not None and (report.missing_keys or report.incorrect_shapes):
        what = f"MODEL.WEIGHTS: {checkpointer.loaded_from} is of another model than {cfg.MODEL.NAME} with MODEL.ARGS"
        raise ConfigError("\n".join([f"{what}:", *report.differences()]))
    return rest


class DefaultPredictor:
    """Predicts for one sample or several, with a config's model and the weights of MODEL.WEIGHTS.

    Args:
        cfg: the config of the run that trained it, with MODEL.WEIGHTS set.

    Raises:
        ConfigError: MODEL.WEIGHTS is empty or cannot be read.

    Example::

        predict = DefaultPredictor(cfg)
        logits = predict(image)
        batch_of_logits = predict.batch([image, other])
    """

    def __init__(self, cfg: CfgNode) -> None:
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("MODEL.WEIGHTS: is empty; a predictor needs the weights of a trained model")
        self.cfg = cfg.clone()
        self.device = resolve_device(cfg.MODEL.DEVICE)
        self.model = build_model(cfg).eval()
        load_weights(cfg, self.model)
        self.adapter = build_adapter(cfg)
        self._collate = build_collate_fn(cfg, None) or default_collate

    def __call__(self, sample: Batch) -> Outputs:
        """Predict for one sample.

        Args:
            sample: a sample of the data set, without its target and without a batch dimension: a tensor, a NumPy array,
                or a dict or tuple of these.

        Returns:
            The model's output without the batch dimension.
        """
        return _first(self.batch([sample]))

    def batch(self, samples: Batch) -> Outputs:
        """Predict for several samples.

        Args:
            samples: a list of samples, which the config's DATALOADER.COLLATE_FN makes a batch of; or a batch.

        Returns:
            The model's output, with an entry for each sample.
        """
        if isinstance(samples, list):
            samples = self._collate(samples)
        elif isinstance(samples, np.ndarray):
            samples = torch.from_numpy(samples)
        samples = move_to_device(samples, self.device)
        with inference_context(self.model), torch.no_grad():
            return self.adapter.predict(self.model, samples)


def _first(outputs: Outputs) -> Outputs:
    """The outputs of the first sample of a batch."""
    if isinstance(outputs, torch.Tensor):
        return outputs[0] if outputs.dim() else outputs
    if isinstance(outputs, tuple) and not hasattr(outputs, "_asdict"):
        return tuple(map(_first, outputs))
    if isinstance(outputs, list):
        return outputs[0]
    named = entries_of(outputs)
    return outputs if named is None else {name: _first(value) for name, value in named.items()}
