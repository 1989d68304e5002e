"""Predicts with a trained model."""

from typing import Any

import torch

from ...config import CfgNode, ConfigError
from ..checkpoint import Checkpointer
from ..data.transfer import move_to_device
from ..evaluation.evaluator import inference_context
from ..modeling import build_adapter, build_model, resolve_device

__all__ = ["DefaultPredictor"]


class DefaultPredictor:
    """Predicts for one sample at a time, with a config's model and the weights of MODEL.WEIGHTS.

    Args:
        cfg: the config of the run that trained it, with MODEL.WEIGHTS set.

    Raises:
        ConfigError: MODEL.WEIGHTS is empty or cannot be read.

    Example::

        predict = DefaultPredictor(cfg)
        logits = predict(image)
    """

    def __init__(self, cfg: CfgNode) -> None:
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("MODEL.WEIGHTS: is empty; a predictor needs the weights of a trained model")
        self.cfg = cfg.clone()
        self.device = resolve_device(cfg.MODEL.DEVICE)
        self.model = build_model(cfg)
        self.adapter = build_adapter(cfg)
        checkpointer = Checkpointer(self.model)
        checkpointer.load(
            cfg.MODEL.WEIGHTS,
            checkpointables=[],
            strict=cfg.MODEL.WEIGHTS_STRICT,
            weights_from=cfg.MODEL.WEIGHTS_FROM,
        )
        if checkpointer.missing_keys:
            raise ConfigError(
                f"MODEL.WEIGHTS: {cfg.MODEL.WEIGHTS} is of another model: it has no {checkpointer.missing_keys[0]}"
            )
        self.model.eval()

    def __call__(self, sample: torch.Tensor) -> Any:
        """Predict for one sample.

        Args:
            sample: a sample of the data set, without its target and without a batch dimension.

        Returns:
            The model's output; a tensor has no batch dimension.
        """
        batch = move_to_device(sample.unsqueeze(0), self.device)
        with inference_context(self.model), torch.no_grad():
            outputs = self.adapter.predict(self.model, batch)
        return outputs[0] if isinstance(outputs, torch.Tensor) else outputs
