"""A loss with parameters or buffers, which a run trains and saves."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config import ConfigError
from .. import comm
from ..parallel.copies import share_tensors

logger = logging.getLogger(__name__)


class LossModule:
    """The state of a loss: parameters and buffers that are not also the model's.

    The class weights of torch's losses, which are buffers, do not belong to it: they are arguments of the script.

    Args:
        module: the loss.
        model: the model.
    """

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self.module = module
        others = {id(one) for one in (*model.parameters(), *model.buffers())}
        for child in module.modules():
            if isinstance(child, nn.modules.loss._Loss):
                others |= {id(child._buffers.get(name)) for name in ("weight", "pos_weight")}
        named = (*module.named_parameters(), *module.named_buffers())
        self._own = {name for name, one in named if id(one) not in others}
        tensors = {name for name, _ in named}
        self.names = [name for name in module.state_dict() if name in self._own or name not in tensors]
        """Names of the state."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the loss's own parameters by name, such as ``loss.temperature``."""
        return {f"loss.{name}": one for name, one in self.module.named_parameters() if name in self._own}

    def check_optimized(self, optimizer: Any) -> None:
        """Check that an optimizer has the loss's parameters.

        Raises:
            ConfigError: it lacks one that requires a gradient.
        """
        optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, one in self.named_parameters().items():
            if one.requires_grad and id(one) not in optimized:
                raise ConfigError(
                    f"MODEL.LOSS: the optimizer does not update the loss's parameter {name.removeprefix('loss.')}: add "
                    "the loss's parameters to the optimizer, or call requires_grad_(False) on them"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the loss's own parameters and buffers."""
        state = self.module.state_dict()
        return {name: state[name] for name in self.names}

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Restore what :meth:`state_dict` returned. None, of a run whose loss had no state, changes nothing.

        Raises:
            ConfigError: ``strict`` is set, and it is the state of another loss.
        """
        if state is None:
            logger.warning("The loss keeps its state: the checkpoint has none of a loss")
            return
        before, buffers = deepcopy(self.module.state_dict()), dict(self.module.named_buffers())
        try:
            # The class weights of torch's losses are the script's.
            self.module.load_state_dict({**{name: before[name] for name in before.keys() - set(self.names)}, **state})
        except RuntimeError as error:
            if strict:
                raise ConfigError(f"MODEL.LOSS: the checkpoint holds the state of another loss: {error}") from error
            self.module.load_state_dict(before)
            logger.warning("The loss keeps its state, the checkpoint's does not fit: %s", error)
        if changed := [name for name in buffers.keys() & before.keys() if not torch.equal(buffers[name], before[name])]:
            logger.info("The loss's buffers get the checkpoint's values: %s", ", ".join(sorted(changed)))

    def load_from(self, content: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state from a checkpoint whose weights were loaded, if that has some; see :meth:`load_state_dict`.

        Args:
            content: the other content of the checkpoint.
            strict: raise an error if it is the state of another loss; otherwise a warning is logged.
        """
        if state := content.get("trainer", {}).get("loss"):
            self.load_state_dict(state, strict)

    def average(self, ranks: int) -> None:
        """Average the gradients over the ranks, and give all ranks rank 0's buffers. All ranks call it in each step."""
        parameters = [one for one in self.named_parameters().values() if one.requires_grad]
        used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=comm.object_group())
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(ranks)
        share_tensors(one for name, one in self.module.named_buffers() if name in self._own)
