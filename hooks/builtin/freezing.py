"""Frozen layers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...config import ConfigError, Duration
from ...config.components import errors_at
from ..base import HOOK_REGISTRY, HookBase
from ..common import describe_no_match, matches, plain_name, unwrap_model

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class ModelFreezer(HookBase):
    """Freezes parts of the model, for the whole run or until an iteration, all at once or layer by layer.

    A frozen parameter has no gradient, so the optimizer does not change it, momentum and weight decay included. It
    stays in the optimizer, and is trained again with the current learning rate of its parameter group: in a config,
    ``SOLVER.PARAM_GROUPS`` gives it another one. Batch norms in a frozen part are in eval mode: they use their
    statistics and do not change them.

    The iteration determines what is frozen, so nothing is saved. Parameters that did not require gradients before
    never do. Acts in ``before_train``, and in ``before_step`` when something changes.

    Args:
        layers: a name or a list of names of submodules, parameters or classes, such as "features", "features.0.*" or
            "BatchNorm2d" (see :func:`~hookline.hooks.common.matches`). A submodule includes its submodules.
        until: when to unfreeze: a duration in iterations or epochs, one for all or one per layer; 0: never.

    Raises:
        ConfigError: a name matches nothing in the model; the message suggests the closest name.

    Example: ``ModelFreezer(["features.9", "features"], until=["1ep", "3ep"])`` trains the rest of the model in the
    first epoch, then the last layer of the features too, then everything.
    """

    def __init__(
        self,
        layers: str | Sequence[str],
        until: "Duration | int | str | Sequence[Duration | int | str]" = 0,
    ) -> None:
        self.layers = [layers] if isinstance(layers, str) else list(layers)
        if not self.layers or not all(isinstance(name, str) and name for name in self.layers):
            raise ConfigError(f"ModelFreezer: layers must be names of submodules or parameters, not {layers!r}")
        self._until = self._parse(until)
        self._ends: dict[nn.Parameter | nn.Module, int | None] = {}  # see _find()
        self._frozen_norms: list[nn.Module] = []

    def _parse(self, given: Any) -> list[Duration]:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        lengths: Any = given if several else [given] * len(self.layers)
        if len(lengths) != len(self.layers):
            raise ConfigError(f"ModelFreezer: until has {len(lengths)} durations for {len(self.layers)} layers")
        return [Duration.parse_length(length) for length in lengths]

    def before_train(self) -> None:
        self._ends = self._ends or self._find()
        self._changes = set(self._ends.values())
        self._apply(self.trainer.start_iter)

    def before_step(self) -> None:
        if self.trainer.iter in self._changes:
            self._apply(self.trainer.iter)
        elif self._frozen_norms and self._frozen_norms[0].training:  # model.train() was called
            self._keep_norms()

    def after_train(self) -> None:
        """Unfreeze everything that this hook froze."""
        for one in self._ends:
            if isinstance(one, nn.Parameter):
                one.requires_grad_(True)
        for norm in self._frozen_norms:
            norm.train()
        self._ends, self._frozen_norms = {}, []

    def _find(self) -> dict[nn.Parameter | nn.Module, int | None]:
        """Return what is frozen, parameters and norms, with the first iteration that trains it again; None: never."""
        trainer = self.trainer
        if isinstance(trainer.model, nn.parallel.DistributedDataParallel) and not trainer.model.find_unused_parameters:
            raise ConfigError(
                "ModelFreezer: DistributedDataParallel waits for gradients of frozen layers; create it with "
                "find_unused_parameters=True"
            )
        model = unwrap_model(trainer.model)
        modules = {plain_name(name): module for name, module in model.named_modules() if name}
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        ends: dict[nn.Parameter | nn.Module, int | None] = {}
        for pattern, until in zip(self.layers, self._until, strict=True):
            chosen = [module for name, module in modules.items() if matches(pattern, name, module)]
            found = [parameter for name, parameter in parameters.items() if matches(pattern, name)]
            if not chosen and not found:
                raise ConfigError(f"ModelFreezer: {describe_no_match(model, pattern, list(parameters))}")
            with errors_at("ModelFreezer: until"):
                end = until.iterations(trainer.iters_per_epoch) if until else None
            # For what several names match, the first of them in the list counts.
            for parameter in [*found, *(parameter for module in chosen for parameter in module.parameters())]:
                if parameter.requires_grad:
                    ends.setdefault(parameter, end)
            for norm in (norm for module in chosen for norm in module.modules()):
                if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.training:
                    ends.setdefault(norm, end)
        return ends

    def _apply(self, iteration: int) -> None:
        """Freeze and unfreeze for an iteration."""
        number = 0
        for norm in self._frozen_norms:
            norm.train()
        self._frozen_norms = []
        for one, end in self._ends.items():
            frozen = end is None or iteration < end
            if not isinstance(one, nn.Parameter):
                self._frozen_norms += [one] if frozen else []
                continue
            if one.requires_grad == frozen:
                one.requires_grad_(not frozen)
                one.grad = None
            number += one.numel() if frozen else 0
        self._keep_norms()
        logger.info("ModelFreezer: from iteration %d on, %d parameters are frozen", iteration, number)

    def _keep_norms(self) -> None:
        for norm in self._frozen_norms:
            norm.eval()

    def on_eval_end(self) -> None:
        self._keep_norms()

    def after_eval(self, results: Mapping[str, object]) -> None:
        self._keep_norms()  # the evaluation may have called model.train()
