"""Parameter groups: the learning rate and weight decay of each parameter."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...config import CfgNode, ConfigError, get_cfg
from ...config.components import errors_at
from ...config.signatures import bind
from ...hooks.common import describe_no_match, matches, plain_name

logger = logging.getLogger(__name__)

Group = dict[str, Any]
"""A group of parameters ("params") of a torch optimizer, with their settings by name."""

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
    overrides: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Group]:
    """Return the parameter groups of a model. Frozen parameters are left out, shared ones appear once.

    Args:
        model: the model.
        base_lr: learning rate of every group. None: the optimizer's default.
        weight_decay: weight decay of parameters without another setting. None: the optimizer's default.
        weight_decay_norm: weight decay of normalisation layers: torch's, and parameters of one dimension of modules
            whose class name ends in "Norm". None: ``weight_decay``.
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
    special = dict(overrides or {})
    bias: dict[str, object] = {}
    if scales_bias:
        bias["lr"] = base_lr * bias_lr_factor  # type: ignore[operator]
    if weight_decay_bias is not None:
        bias["weight_decay"] = weight_decay_bias
    if bias and special.setdefault("bias", bias) is not bias:
        raise ValueError('overrides["bias"] contradicts bias_lr_factor or weight_decay_bias: give one of them')

    common = {}
    if base_lr is not None:
        common["lr"] = base_lr
    if weight_decay is not None:
        common["weight_decay"] = weight_decay
    groups = []
    seen = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            values = common.copy()
            if weight_decay_norm is not None and _is_of_norm(module, parameter):
                values["weight_decay"] = weight_decay_norm
            if lr_factor_func is not None:
                values["lr"] *= lr_factor_func(f"{module_name}.{name}" if module_name else name)
            groups.append({"params": [parameter], **values, **special.get(name, {})})
    return reduce_param_groups(groups)


def _is_of_norm(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a module's parameter is one of a norm: torch's, or one such as ``LlamaRMSNorm`` by its name."""
    if isinstance(module, NORM_MODULES):
        return True
    return parameter.dim() <= 1 and any(cls.__name__.endswith("Norm") for cls in type(module).__mro__)


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Merge groups with equal hyper-parameters. The optimizer's step is faster with few large groups.

    Args:
        groups: groups of a torch optimizer; "params" is a list of parameters. A later group with the same parameter
            overrides and adds values.

    Returns:
        The same parameters in fewer groups, in order of first appearance.
    """
    merged: dict[tuple[object, ...], Group] = {}
    for group in _expand_param_groups(groups):
        parameters = group.pop("params")
        target = merged.setdefault(tuple(sorted(group.items())), {"params": [], **group})
        target["params"] += parameters
    return list(merged.values())


def _expand_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Return a group for each parameter, with the values of all its groups. Projects of detectron2 import it."""
    expanded: dict[nn.Parameter, Group] = {}
    for group in groups:
        for parameter in group["params"]:
            expanded.setdefault(parameter, {}).update({**group, "params": [parameter]})
    return list(expanded.values())


def warn_of_unused(cfg: CfgNode, keys: Sequence[str], by: str) -> None:
    """Log which of some keys of SOLVER, without effect, are set, such as in a base config for another optimizer."""
    defaults = get_cfg().SOLVER if keys else {}
    for key in keys:
        if cfg.SOLVER[key] != defaults[key]:
            logger.warning("SOLVER.%s: %r has no effect on %s", key, cfg.SOLVER[key], by)


def full_config(cfg: Any) -> Any:
    """Return a config with all keys. One of detectron2 (fvcore's CfgNode, a DictConfig) is read into the defaults.

    Its clipping by "norm" limits each parameter's norm, which is "param_norm" here.
    """
    if "OPTIMIZERS" in cfg.SOLVER:
        return cfg
    full = get_cfg()

    def known(values: Mapping[str, Any], section: CfgNode) -> dict[str, object]:
        return {
            key: known(values[key], section[key])
            if isinstance(values[key], Mapping)
            else list(values[key])
            if isinstance(values[key], Sequence) and not isinstance(values[key], str)
            else values[key]
            for key in section
            if key in values
        }

    full.SOLVER.merge_from_other_cfg(CfgNode(known(cfg.SOLVER, full.SOLVER)))
    if full.SOLVER.CLIP_GRADIENTS.CLIP_TYPE == "norm":
        full.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = "param_norm"
    return full


# ---------------------------------------------------------------------- SOLVER.PARAM_GROUPS


def apply_param_rules(cfg: CfgNode, model: nn.Module, groups: list[Group]) -> list[Group]:
    """Return parameter groups with the settings of ``SOLVER.PARAM_GROUPS``.

    Args:
        cfg: the config.
        model: the model, for the names of parameters.
        groups: groups with "lr"; they are not changed.

    Raises:
        ConfigError: a rule is malformed or matches nothing.
    """
    settings: dict[nn.Parameter, Group] = {}
    for i, rule in enumerate(check_param_rules(cfg)):
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in rule.ARGS.items()}
        values |= {name.lower(): number for name, number in rule.numbers().items()}
        for parameter in _matching(model, rule, f"SOLVER.PARAM_GROUPS[{i}]"):
            settings[parameter] = {**values, **settings.get(parameter, {})}  # the first rule has precedence
    split = []
    for group in groups:
        for parameter in group["params"]:
            values = settings.get(parameter, {}).copy()
            lr = group["lr"] * values.pop("lr_factor", 1.0)
            split.append({**group, **values, "params": [parameter], "lr": lr})
    return reduce_param_groups(split)


def _matching(model: nn.Module, rule: "_Rule", key: str) -> list[nn.Parameter]:
    if rule.PARAMS is not None:
        return list(find_parameters(model, rule.PARAMS, f"{key}.PARAMS").values())
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    found = [parameter for name, parameter in named.items() if re.search(rule.REGEX or "", name)]
    if not found:
        raise ConfigError(f"{key}.REGEX: {rule.REGEX!r} is found in no parameter's name, such as {next(iter(named))}")
    return found


def find_parameters(model: nn.Module, patterns: str | Iterable[str], key: str) -> dict[str, nn.Parameter]:
    """Return the parameters that one or more patterns match, by name.

    Args:
        model: the model.
        patterns: see :func:`~hookline.hooks.common.matches`.
        key: the config key, for messages.

    Raises:
        ConfigError: a pattern matches nothing; the message suggests the nearest name.
    """
    found: dict[str, nn.Parameter] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = _matching_parameters(model, pattern)
        if not matched:
            raise ConfigError(f"{key}: {describe_no_match(model, pattern, [n for n, _ in model.named_parameters()])}")
        found |= matched
    return found


@dataclass(kw_only=True)
class _Rule:
    """A rule of ``SOLVER.PARAM_GROUPS``."""

    PARAMS: str | list[str] | None = None
    REGEX: str | None = None
    LR_FACTOR: float | None = None
    WEIGHT_DECAY: float | None = None
    ARGS: dict[str, object] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return the numbers that the rule sets."""
        numbers = {"LR_FACTOR": self.LR_FACTOR, "WEIGHT_DECAY": self.WEIGHT_DECAY}
        return {name: number for name, number in numbers.items() if number is not None}


def check_param_rules(cfg: CfgNode) -> list[_Rule]:
    """Check the form of the rules, and return them.

    Raises:
        ConfigError: the first problem found.
    """
    rules = []
    for i, entry in enumerate(cfg.SOLVER.PARAM_GROUPS):
        key = f"SOLVER.PARAM_GROUPS[{i}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{key}: a rule is a mapping such as {{PARAMS: backbone, LR_FACTOR: 0.1}}, not {entry!r}")
        _, values = bind(_Rule, entry, key=key, label="a rule")
        rule = _Rule(**values)
        if (rule.PARAMS is None) == (rule.REGEX is None):
            raise ConfigError(f"{key}: needs one of PARAMS and REGEX")
        if not (rule.numbers() or rule.ARGS):
            raise ConfigError(f"{key}: sets nothing; give LR_FACTOR, WEIGHT_DECAY or ARGS")
        for name, number in rule.numbers().items():
            if not number >= 0:  # also refuses NaN
                raise ConfigError(f"{key}.{name}: expected a number that is not negative, got {number!r}")
        if "lr" in rule.ARGS:
            raise ConfigError(f"{key}.ARGS.lr: use LR_FACTOR, a multiple of SOLVER.BASE_LR")
        with errors_at(f"{key}.REGEX"):
            re.compile(rule.REGEX or "")
        rules.append(rule)
    return rules


def _matching_parameters(model: nn.Module, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters that a pattern matches, and those of the submodules that it matches, by name."""
    found = {}
    modules = [name for name, module in model.named_modules() if name and matches(pattern, plain_name(name), module)]
    for name, parameter in model.named_parameters():
        if matches(pattern, plain_name(name)) or any(name.startswith(f"{module}.") for module in modules):
            found[plain_name(name)] = parameter
    return found
