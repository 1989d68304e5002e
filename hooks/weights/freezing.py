"""Frozen layers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..common.models import describe_no_match, matches, unwrap_model

__all__ = ["ModelFreezer"]

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """Parameters and norms, and the iterations in which they are frozen; ``until`` is the first one after them."""

    parameters: list[nn.Parameter]
    norms: list[nn.Module]
    since: int
    until: int | None

    def is_frozen(self, iteration: int) -> bool:
        return self.since <= iteration and (self.until is None or iteration < self.until)


@HOOK_REGISTRY.register()
class ModelFreezer(HookBase):
    """Freezes parts of the model, from an iteration on or until one, all at once or layer by layer.

    A frozen parameter has no gradient, so the optimizer does not change it, momentum and weight decay included. It
    stays in the optimizer, and is trained again with the current learning rate of its parameter group: in a config,
    ``SOLVER.PARAM_GROUPS`` gives it another one. Batch norms in a frozen part are in eval mode: they use their
    statistics and do not change them.

    The iteration determines what is frozen, so nothing is saved. Parameters that did not require gradients before
    never do. Acts in ``before_train``, and in ``before_step`` when something changes.

    Args:
        layers: a name or a list of names of submodules, parameters or classes, such as "features", "features.0.*" or
            "BatchNorm2d" (see :func:`~hookline.hooks.common.models.matches`). A submodule includes its submodules.
        until: when to unfreeze: a duration in iterations or epochs, one for all or one per layer; 0: never.
        since: when to freeze, in the same form; 0: from the start.

    Raises:
        ConfigError: a name matches nothing in the model; the message suggests the closest name.

    Example: ``ModelFreezer(["features.9", "features"], until=["1ep", "3ep"])`` trains the rest of the model in the
    first epoch, then the last layer of the features too, then everything.
    """

    def __init__(
        self,
        layers: str | Sequence[str],
        until: "Duration | int | str | Sequence[Duration | int | str]" = 0,
        since: "Duration | int | str | Sequence[Duration | int | str]" = 0,
    ) -> None:
        self.layers = [layers] if isinstance(layers, str) else list(layers)
        if not self.layers or not all(isinstance(name, str) and name for name in self.layers):
            raise ConfigError(f"ModelFreezer: layers must be names of submodules or parameters, not {layers!r}")
        self._since, self._until = self._parse("since", since), self._parse("until", until)
        self._parts: list[_Part] | None = None
        self._frozen_norms: list[nn.Module] = []
        self._next: int | None = None

    def _parse(self, name: str, given: Any) -> list[Duration]:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        lengths: Any = given if several else [given] * len(self.layers)
        if len(lengths) != len(self.layers):
            raise ConfigError(f"ModelFreezer: {name} has {len(lengths)} durations for {len(self.layers)} layers")
        return [Duration.parse_length(length) for length in lengths]

    def before_train(self) -> None:
        if self._parts is None:
            self._parts = self._find()
        self._apply(self.trainer.start_iter)

    def before_step(self) -> None:
        if self._next is not None and self.trainer.iter >= self._next:
            self._apply(self.trainer.iter)
        elif self._frozen_norms and self._frozen_norms[0].training:  # model.train() was called
            self._keep_norms()

    def after_train(self) -> None:
        """Unfreeze everything that this hook froze."""
        for part in self._parts or ():
            for parameter in part.parameters:
                parameter.requires_grad_(True)
        for norm in self._frozen_norms:
            norm.train()
        self._parts, self._frozen_norms = None, []

    def _find(self) -> list[_Part]:
        trainer = self.trainer
        if isinstance(trainer.model, nn.parallel.DistributedDataParallel) and not trainer.model.find_unused_parameters:
            raise ConfigError(
                "ModelFreezer: DistributedDataParallel waits for gradients of frozen layers; create it with "
                "find_unused_parameters=True"
            )
        model = unwrap_model(trainer.model)
        modules = {name.replace("_orig_mod.", ""): module for name, module in model.named_modules() if name}
        parameters = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
        parts: list[_Part] = []
        found: set[Any] = set()  # for a part that matches several names, the first of them in the list counts
        for pattern, since, until in zip(self.layers, self._since, self._until, strict=True):
            first, end = self._iterations("since", since), self._iterations("until", until) if until else None
            if end is not None and end <= first:
                raise ConfigError(f"ModelFreezer: until ({until}) must be after since ({since})")
            chosen = [module for name, module in modules.items() if matches(pattern, name, module)]
            single = [parameter for name, parameter in parameters.items() if matches(pattern, name)]
            if not chosen and not single:
                raise ConfigError(f"ModelFreezer: {describe_no_match(model, pattern, list(parameters))}")
            own = [*single, *(parameter for module in chosen for parameter in module.parameters())]
            own = [parameter for parameter in dict.fromkeys(own) if parameter.requires_grad and parameter not in found]
            norms = dict.fromkeys(
                one
                for module in chosen
                for one in module.modules()
                if isinstance(one, nn.modules.batchnorm._NormBase) and one.training and one not in found
            )
            found |= {*own, *norms}
            parts.append(_Part(own, list(norms), first, end))
        return parts

    def _iterations(self, name: str, length: Duration) -> int:
        try:
            return length.iterations(self.trainer.iters_per_epoch) if length else 0
        except ConfigError as error:
            raise ConfigError(f"ModelFreezer: {name}: {error}") from None

    def _apply(self, iteration: int) -> None:
        """Freeze and unfreeze for an iteration, and find the next iteration with a change."""
        parts = self._parts or []
        numbers = {True: 0, False: 0}
        for norm in self._frozen_norms:
            norm.train()
        self._frozen_norms = []
        for part in parts:
            frozen = part.is_frozen(iteration)
            for parameter in part.parameters:
                if parameter.requires_grad == frozen:
                    parameter.requires_grad_(not frozen)
                    parameter.grad = None
                numbers[frozen] += parameter.numel()
            self._frozen_norms += part.norms if frozen else []
        self._keep_norms()
        changes = [change for part in parts for change in (part.since, part.until)]
        self._next = min((change for change in changes if change is not None and change > iteration), default=None)
        logger.info(
            "ModelFreezer: from iteration %d on, %d parameters are frozen%s%s",
            iteration,
            numbers[True],
            f", {numbers[False]} are trained" if numbers[False] else "",
            f"; the next change is at iteration {self._next}" if self._next is not None else "",
        )

    def _keep_norms(self) -> None:
        for norm in self._frozen_norms:
            norm.eval()

    def on_eval_end(self) -> None:
        self._keep_norms()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self._keep_norms()  # the evaluation may have called model.train()
