"""Parameter groups: which parameter is trained with which learning rate and weight decay."""

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
    """Parameter groups of a model. Frozen parameters are left out, shared ones appear once.

    Args:
        model: whose parameters.
        base_lr: learning rate of every group. None: the optimizer's own.
        weight_decay: of every parameter for which nothing else is said. None: the optimizer's own.
        weight_decay_norm: of the parameters of normalisation layers. None: ``weight_decay``.
        bias_lr_factor: learning rate of parameters called "bias", as a multiple of ``base_lr``.
        weight_decay_bias: of parameters called "bias". None: as for other parameters.
        lr_factor_func: given a parameter's full name, returns a factor for its learning rate.
        overrides: hyper-parameters by a parameter's own name, its name's last part; they win over all the above.
            ``{"embedding": {"lr": 0.01, "weight_decay": 0.1}}`` sets those of every parameter called "embedding".

    Returns:
        Groups for any torch optimizer, one for each distinct set of hyper-parameters, in order of first appearance.

    Raises:
        ValueError: a learning rate is to be scaled and ``base_lr`` is None, or biases are given twice.
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
    """Merge the groups whose hyper-parameters are equal: an optimizer's step is faster on few large groups.

    Args:
        groups: as a torch optimizer takes them; "params" is a list of parameters.

    Returns:
        The same parameters in fewer groups, in order of first appearance.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        target = merged.setdefault(tuple(sorted(values.items())), {"params": [], **values})
        target["params"] += group["params"]
    return list(merged.values())
