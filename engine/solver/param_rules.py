"""Rules of a config for single parameters: ``SOLVER.PARAM_GROUPS`` and ``SOLVER.LAYER_DECAY``."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...config import CfgNode, ConfigError, suggest
from ...hooks.common.models import describe_no_match, parameters_of
from .param_groups import reduce_param_groups

__all__ = ["apply_param_rules", "check_param_rules", "find_parameters"]

KEYS = ("PARAMS", "REGEX", "LR_FACTOR", "WEIGHT_DECAY", "ARGS")


def apply_param_rules(cfg: CfgNode, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups with the settings of the config's rules.

    Args:
        cfg: the config.
        model: the model, for the names of parameters.
        groups: groups with "lr"; they are not changed.

    Raises:
        ConfigError: a rule is malformed or matches nothing.
    """
    check_param_rules(cfg)
    rules, decay = cfg.SOLVER.PARAM_GROUPS, cfg.SOLVER.LAYER_DECAY
    if not rules and decay.FACTOR == 1.0:
        return groups
    settings: dict[nn.Parameter, dict[str, Any]] = {}
    for i, rule in enumerate(rules):
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in _settings(rule).items()}
        for parameter in _matching(model, rule, f"SOLVER.PARAM_GROUPS[{i}]"):
            settings[parameter] = {**values, **settings.get(parameter, {})}  # the first rule has precedence
    factors = _layer_factors(model, decay) if decay.FACTOR != 1.0 else {}
    split = []
    for group in groups:
        for parameter in group["params"]:
            own = settings.get(parameter, {}).copy()
            lr = group["lr"] * own.pop("lr_factor", 1.0) * factors.get(parameter, 1.0)
            split.append({**group, **own, "params": [parameter], "lr": lr})
    return reduce_param_groups(split)


def check_param_rules(cfg: CfgNode) -> None:
    """Check the form of the rules.

    Raises:
        ConfigError: the first problem found.
    """
    for i, rule in enumerate(cfg.SOLVER.PARAM_GROUPS):
        key = f"SOLVER.PARAM_GROUPS[{i}]"
        if not isinstance(rule, Mapping):
            raise ConfigError(f"{key}: a rule is a mapping such as {{PARAMS: backbone, LR_FACTOR: 0.1}}, not {rule!r}")
        for name in rule:
            if name not in KEYS:
                raise ConfigError(
                    f"{key}.{name}: there is no such key{suggest(str(name), KEYS) or '.'} Keys: {', '.join(KEYS)}"
                )
        if ("PARAMS" in rule) == ("REGEX" in rule):
            raise ConfigError(f"{key}: needs one of PARAMS and REGEX")
        if len(rule) == 1:
            raise ConfigError(f"{key}: sets nothing; give LR_FACTOR, WEIGHT_DECAY or ARGS")
        for name in ("LR_FACTOR", "WEIGHT_DECAY"):
            number = rule.get(name, 0)
            if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
                raise ConfigError(f"{key}.{name}: expected a number that is not negative, got {number!r}")
        if not isinstance(rule.get("ARGS", {}), Mapping):
            raise ConfigError(f"{key}.ARGS: expected a mapping of the optimizer's settings, got {rule['ARGS']!r}")
        if "lr" in rule.get("ARGS", {}):
            raise ConfigError(f"{key}.ARGS.lr: use LR_FACTOR, a multiple of SOLVER.BASE_LR")
        _check_patterns(rule.get("PARAMS", "*"), f"{key}.PARAMS")
        try:
            re.compile(rule.get("REGEX", ""))
        except (re.error, TypeError) as error:
            raise ConfigError(f"{key}.REGEX: {rule['REGEX']!r} is not a regular expression: {error}") from None
    decay = cfg.SOLVER.LAYER_DECAY
    if decay.FACTOR != 1.0 and not decay.LAYERS:
        raise ConfigError(
            f"SOLVER.LAYER_DECAY.FACTOR: is {decay.FACTOR}, but SOLVER.LAYER_DECAY.LAYERS is empty; list the layers "
            'from input to output, such as ["embedding", "blocks.*", "head"]'
        )
    _check_patterns(decay.LAYERS, "SOLVER.LAYER_DECAY.LAYERS")


def find_parameters(model: nn.Module, patterns: str | Iterable[str], key: str) -> dict[str, nn.Parameter]:
    """Return the parameters that one or more patterns match, by name.

    Args:
        model: the model.
        patterns: see :func:`~hookline.hooks.common.models.matches`.
        key: the config key, for messages.

    Raises:
        ConfigError: a pattern matches nothing; the message suggests the nearest name.
    """
    found: dict[str, nn.Parameter] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = parameters_of(model, pattern)
        if not matched:
            raise ConfigError(f"{key}: {describe_no_match(model, pattern, [n for n, _ in model.named_parameters()])}")
        found |= matched
    return found


def _check_patterns(patterns: Any, key: str) -> None:
    several = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(several, list | tuple) or not all(isinstance(one, str) and one for one in several):
        raise ConfigError(f"{key}: expected a name or a list of names, got {patterns!r}")


def _settings(rule: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(rule.get("ARGS", {}))
    if "WEIGHT_DECAY" in rule:
        values["weight_decay"] = rule["WEIGHT_DECAY"]
    if "LR_FACTOR" in rule:
        values["lr_factor"] = rule["LR_FACTOR"]
    return values


def _matching(model: nn.Module, rule: Mapping[str, Any], key: str) -> list[nn.Parameter]:
    if "PARAMS" in rule:
        return list(find_parameters(model, rule["PARAMS"], f"{key}.PARAMS").values())
    named = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
    found = [parameter for name, parameter in named.items() if re.search(rule["REGEX"], name)]
    if not found:
        shown = ", ".join(list(named)[:10]) + (", …" if len(named) > 10 else "")
        raise ConfigError(f"{key}.REGEX: {rule['REGEX']!r} is found in no parameter's name. Names: {shown}")
    return found


def _layer_factors(model: nn.Module, decay: CfgNode) -> dict[nn.Parameter, float]:
    """Return each parameter's factor. A pattern that matches several submodules stands for as many layers."""
    layers: list[list[nn.Parameter]] = []
    for pattern in decay.LAYERS:
        parts: dict[str, list[nn.Parameter]] = {}
        depth = pattern.count(".") + 1
        for name, parameter in find_parameters(model, pattern, "SOLVER.LAYER_DECAY.LAYERS").items():
            parts.setdefault(".".join(name.split(".")[:depth]), []).append(parameter)
        layers += parts.values()
    factors: dict[nn.Parameter, float] = {}
    for i, layer in enumerate(layers):
        for parameter in layer:
            factors.setdefault(parameter, decay.FACTOR ** (len(layers) - 1 - i))
    return factors
