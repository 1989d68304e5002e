"""Frozen layers."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...config import ConfigError, Duration
from ..base import HOOK_REGISTRY, HookBase
from ..common.models import describe_no_match, matches, optimizers_of, unwrap_model

__all__ = ["ModelFreezer"]

logger = logging.getLogger(__name__)


class _Span(NamedTuple):
    """Iterations in which something is frozen; ``until`` is the first one after them, None: never.

    ``ramp`` is the number of iterations after them with a smaller learning rate.
    """

    since: int
    until: int | None
    ramp: int = 0

    def contains(self, iteration: int) -> bool:
        return self.since <= iteration and (self.until is None or iteration < self.until)

    def progress(self, iteration: int) -> float:
        """The part of the ramp that is done, from 0 to 1."""
        if not self.ramp or self.until is None or iteration < self.until:
            return 1.0
        return min(1.0, (iteration - self.until) / self.ramp)


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
        ramp: how long the learning rate of an unfrozen part rises to that of its parameter group: a duration in
            iterations or epochs, one for all or one per layer; 0: it has that rate at once. Until then its updates are
            scaled, and need a copy of its weights.
        ramp_start: the fraction of the rate at which the ramp starts.

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
        ramp: "Duration | int | str | Sequence[Duration | int | str]" = 0,
        ramp_start: float = 0.1,
    ) -> None:
        self.layers = [layers] if isinstance(layers, str) else list(layers)
        if not self.layers or not all(isinstance(name, str) and name for name in self.layers):
            raise ConfigError(f"ModelFreezer: layers must be names of submodules or parameters, not {layers!r}")
        self._since, self._until = self._parse("since", since), self._parse("until", until)
        self._ramp, self._ramp_start = self._parse("ramp", ramp), ramp_start
        if not 0 <= ramp_start <= 1:
            raise ConfigError(f"ModelFreezer: ramp_start is a fraction between 0 and 1, not {ramp_start}")
        if any(ramp and not until for ramp, until in zip(self._ramp, self._until, strict=True)):
            raise ConfigError("ModelFreezer: ramp needs until, the time at which the part is unfrozen")
        self._ramped: list[tuple[nn.Parameter, torch.Tensor, float]] = []
        if any(self._ramp):  # events inside a step only where they are needed
            self.before_optimizer_step = self._remember_ramped  # type: ignore[method-assign]
            self.after_optimizer_step = self._scale_ramped  # type: ignore[method-assign]
        # Each parameter and norm, with the iterations in which it is frozen.
        self._parameters: list[tuple[nn.Parameter, _Span]] | None = None
        self._norms: list[tuple[nn.Module, _Span]] = []
        self._frozen_norms: list[nn.Module] = []
        self._next: int | None = None

    def _parse(self, name: str, given: Any) -> list[Duration]:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        lengths: Any = given if several else [given] * len(self.layers)
        if len(lengths) != len(self.layers):
            raise ConfigError(f"ModelFreezer: {name} has {len(lengths)} durations for {len(self.layers)} layers")
        return [Duration.parse_length(length) for length in lengths]

    def before_train(self) -> None:
        if self._parameters is None:
            self._find()
        self._apply(self.trainer.start_iter)

    def before_step(self) -> None:
        if self._next is not None and self.trainer.iter >= self._next:
            self._apply(self.trainer.iter)
        elif self._frozen_norms and self._frozen_norms[0].training:  # model.train() was called
            self._keep_norms()

    def after_train(self) -> None:
        """Unfreeze everything that this hook froze."""
        for parameter, _ in self._parameters or ():
            parameter.requires_grad_(True)
        for norm in self._frozen_norms:
            norm.train()
        self._parameters, self._frozen_norms = None, []

    def _find(self) -> None:
        trainer = self.trainer
        if isinstance(trainer.model, nn.parallel.DistributedDataParallel) and not trainer.model.find_unused_parameters:
            raise ConfigError(
                "ModelFreezer: DistributedDataParallel waits for gradients of frozen layers; create it with "
                "find_unused_parameters=True"
            )
        model = unwrap_model(trainer.model)
        modules = {name.replace("_orig_mod.", ""): module for name, module in model.named_modules() if name}
        parameters = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
        when: dict[int, tuple[nn.Parameter, _Span]] = {}
        norms: dict[int, tuple[nn.Module, _Span]] = {}
        for pattern, since, until, ramp in zip(self.layers, self._since, self._until, self._ramp, strict=True):
            end = self._iterations("until", until) if until else None
            span = _Span(self._iterations("since", since), end, self._iterations("ramp", ramp))
            if span.until is not None and span.until <= span.since:
                raise ConfigError(f"ModelFreezer: until ({until}) must be after since ({since})")
            chosen = [module for name, module in modules.items() if matches(pattern, name, module)]
            single = [parameter for name, parameter in parameters.items() if matches(pattern, name)]
            if not chosen and not single:
                raise ConfigError(f"ModelFreezer: {describe_no_match(model, pattern, list(parameters))}")
            # For a part that matches several names, the first of them in the list counts.
            for parameter in (*single, *(parameter for module in chosen for parameter in module.parameters())):
                if parameter.requires_grad:
                    when.setdefault(id(parameter), (parameter, span))
            for part in (part for module in chosen for part in module.modules()):
                if isinstance(part, nn.modules.batchnorm._NormBase) and part.training:
                    norms.setdefault(id(part), (part, span))
        self._parameters, self._norms = list(when.values()), list(norms.values())

    def _iterations(self, name: str, length: Duration) -> int:
        try:
            return length.iterations(self.trainer.iters_per_epoch) if length else 0
        except ConfigError as error:
            raise ConfigError(f"ModelFreezer: {name}: {error}") from None

    def _apply(self, iteration: int) -> None:
        """Freeze and unfreeze for an iteration, and find the next iteration with a change."""
        trained = frozen = 0
        for parameter, span in self._parameters or ():
            train = not span.contains(iteration)
            if train != parameter.requires_grad:
                parameter.requires_grad_(train)
                parameter.grad = None
            trained, frozen = trained + train * parameter.numel(), frozen + (not train) * parameter.numel()
        still = [norm for norm, span in self._norms if span.contains(iteration)]
        for norm in self._frozen_norms:
            if not any(norm is other for other in still):
                norm.train()
        self._frozen_norms = still
        self._keep_norms()
        self._start_momentum()
        spans = [span for _, span in (*(self._parameters or ()), *self._norms)]
        changes = [change for span in spans for change in (span.since, span.until)]
        self._next = min((change for change in changes if change is not None and change > iteration), default=None)
        logger.info(
            "ModelFreezer: from iteration %d on, %d parameters are frozen%s%s",
            iteration,
            frozen,
            f", {trained} are trained" if trained else "",
            f"; the next change is at iteration {self._next}" if self._next is not None else "",
        )

    def _remember_ramped(self) -> None:
        iteration, start = self.trainer.iter, self._ramp_start
        self._ramped = [
            (parameter, parameter.detach().clone(), start + (1 - start) * done)
            for parameter, span in self._parameters or ()
            if (done := span.progress(iteration)) < 1 and parameter.grad is not None
        ]

    @torch.no_grad()
    def _scale_ramped(self) -> None:
        """Scale the updates: for optimizers whose update is proportional to the learning rate, that is a rate."""
        for parameter, before, factor in self._ramped:
            parameter.copy_(before.lerp(parameter, factor))
        self._ramped = []

    def _start_momentum(self) -> None:
        """Give unfrozen parameters zero momentum: torch's fused SGD fails if only some have a buffer."""
        optimizer: Any = self.trainer.optimizer
        states = [(one.state, group) for one in optimizers_of(optimizer) for group in one.param_groups]
        for state, group in states:
            if not (group.get("fused") and group.get("momentum")):
                continue
            begun = [p for p in group["params"] if state.get(p, {}).get("momentum_buffer") is not None]
            for parameter in group["params"] if begun else ():
                if parameter.requires_grad and state[parameter].get("momentum_buffer") is None:
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)

    def _keep_norms(self) -> None:
        for norm in self._frozen_norms:
            norm.eval()

    def on_eval_end(self) -> None:
        self._keep_norms()

    def after_eval(self, results: Mapping[str, Any]) -> None:
        self._keep_norms()  # the evaluation may have called model.train()
