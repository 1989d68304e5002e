"""Parameter groups: the learning rate and weight decay of each parameter."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["get_default_optimizer_params", "reduce_param_groups"]

NORM_MODULES = (
    nn.modules.batchnorm._BatchNorm,  # 1d, 2d, 3d, SyncBatchNorm
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    bias_lr_factor: float | None = 1.0,
    weight_decay_bias: float | None = None,
    lr_factor_func: Callable[[str], float] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model. Frozen parameters are left out, shared ones appear once.

    Args:
        model: the model.
        base_lr: learning rate of every group. None: the optimizer's default.
        weight_decay: weight decay of parameters without another setting. None: the optimizer's default.
        weight_decay_norm: weight decay of normalisation layers. None: ``weight_decay``.
        bias_lr_factor: factor of the learning rate of parameters named "bias".
        weight_decay_bias: weight decay of parameters named "bias". None: as for other parameters.
        lr_factor_func: from a parameter's full name to a factor of its learning rate.
        overrides: hyper-parameters by the last part of a parameter's name; they take precedence over all the above.
            ``{"embedding": {"lr": 0.01, "weight_decay": 0.1}}`` applies to every parameter named "embedding".

    Returns:
        Groups for any torch optimizer, one for each distinct set of hyper-parameters, in order of first appearance.

    Raises:
        ValueError: a factor is given without ``base_lr``, or biases are configured twice.
    """
    scales_bias = bias_lr_factor is not None and bias_lr_factor != 1.0
    if base_lr is None and (scales_bias or lr_factor_func is not None):
        raise ValueError("bias_lr_factor and lr_factor_func scale base_lr: give base_lr too")
    special = {name: dict(values) for name, values in (overrides or {}).items()}
    bias: dict[str, Any] = {}
    if scales_bias:
        bias["lr"] = base_lr * bias_lr_factor  # type: ignore[operator]
    if weight_decay_bias is not None:
        bias["weight_decay"] = weight_decay_bias
    if bias and "bias" in special:
        raise ValueError('overrides["bias"] contradicts bias_lr_factor or weight_decay_bias: give one of them')
    if bias:
        special["bias"] = bias

    common = {"lr": base_lr, "weight_decay": weight_decay}
    groups = []
    seen = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            values = {key: value for key, value in common.items() if value is not None}
            if weight_decay_norm is not None and isinstance(module, NORM_MODULES):
                values["weight_decay"] = weight_decay_norm
            if lr_factor_func is not None:
                values["lr"] *= lr_factor_func(f"{module_name}.{name}" if module_name else name)
            groups.append({"params": [parameter], **values, **special.get(name, {})})
    return reduce_param_groups(groups)


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal hyper-parameters. The optimizer's step is faster with few large groups.

    Args:
        groups: groups of a torch optimizer; "params" is a list of parameters. A later group with the same parameter
            overrides and adds values.

    Returns:
        The same parameters in fewer groups, in order of first appearance.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in _expand_param_groups(groups):
        values = {key: value for key, value in group.items() if key != "params"}
        target = merged.setdefault(tuple(sorted(values.items())), {"params": [], **values})
        target["params"] += group["params"]
    return list(merged.values())


def _expand_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a group for each parameter, with the values of all its groups."""
    expanded: dict[Any, dict[str, Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            expanded.setdefault(parameter, {}).update({**group, "params": [parameter]})
    return list(expanded.values())
