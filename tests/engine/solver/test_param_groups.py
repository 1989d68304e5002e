import pytest
import torch
from small_runs import solver_config
from torch import nn

from hookline.config import ConfigError
from hookline.engine.solver import (
    build_optimizer,
    get_default_optimizer_params,
    reduce_param_groups,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))


def by_name(model, groups):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for parameter in group["params"]
    }


def test_each_trainable_parameter_is_in_one_group_of_an_optimizer():
    model = Model()
    model.norm.bias.requires_grad_(False)
    [group] = get_default_optimizer_params(model)
    assert len(group["params"]) == len({id(p) for p in group["params"]}) == 4
    groups = get_default_optimizer_params(Model(), base_lr=0.1, weight_decay=0.1, weight_decay_norm=0.0)
    assert len(torch.optim.AdamW(groups).param_groups) == 2


def test_norms_biases_and_overrides_get_their_own_values():
    model, overrides = Model(), {"scale": {"lr": 0.5}}
    values = {"base_lr": 1.0, "weight_decay": 0.1, "weight_decay_norm": 0.0}
    values |= {"bias_lr_factor": 2.0, "weight_decay_bias": 0.01, "overrides": overrides}
    groups = get_default_optimizer_params(model, **values)
    assert overrides == {"scale": {"lr": 0.5}}
    assert by_name(model, groups) == {
        "scale": {"lr": 0.5, "weight_decay": 0.1},
        "embed.weight": {"lr": 1.0, "weight_decay": 0.1},
        "norm.weight": {"lr": 1.0, "weight_decay": 0.0},
        "norm.bias": {"lr": 2.0, "weight_decay": 0.01},
        "head.bias": {"lr": 2.0, "weight_decay": 0.01},
    }


class LlamaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))


def test_one_dimensional_parameters_of_modules_named_norm_have_the_decay_of_norms():
    model = nn.ModuleDict({"norm": LlamaRMSNorm(), "fc": nn.Linear(4, 4, bias=False)})
    groups = by_name(model, build_optimizer(solver_config(WEIGHT_DECAY=0.1), model).param_groups)
    decays = {name: group["weight_decay"] for name, group in groups.items()}
    assert decays == {"norm.weight": 0.0, "norm.mix": 0.1, "fc.weight": 0.1}


def test_scaling_without_a_base_and_biases_configured_twice_are_refused():
    with pytest.raises(ValueError, match="base_lr"):
        get_default_optimizer_params(Model(), bias_lr_factor=2.0)
    with pytest.raises(ValueError, match="bias"):
        get_default_optimizer_params(Model(), weight_decay_bias=0.0, overrides={"bias": {"lr": 1.0}})


def test_a_later_group_of_the_same_parameter_overrides_the_earlier():
    groups = [
        {"params": ["a", "b"], "lr": 1.0, "weight_decay": 3.0},
        {"params": ["b", "c"], "lr": 2.0},
        {"params": ["d"], "lr": 2.0, "weight_decay": 3.0},
    ]
    assert reduce_param_groups(groups) == [
        {"params": ["a"], "lr": 1.0, "weight_decay": 3.0},
        {"params": ["b", "d"], "lr": 2.0, "weight_decay": 3.0},
        {"params": ["c"], "lr": 2.0},
    ]


class Net(nn.Module):
    """An embedding, two blocks with a norm each, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.head = nn.Linear(4, 3)


def make_cfg(rules=(), **solver):
    adamw = {"OPTIMIZER": {"NAME": "AdamW"}, "BASE_LR": 1.0, "WEIGHT_DECAY": 0.1}
    return solver_config(**adamw, PARAM_GROUPS=list(rules), **solver)


def settings(cfg, name, model=None):
    """The setting of each parameter, by its name."""
    model = model or Net()
    optimizer = build_optimizer(cfg, model)
    of = {p: group[name] for group in optimizer.param_groups for p in group["params"]}
    return {key: of[parameter] for key, parameter in model.named_parameters()}


def test_a_pattern_names_a_submodule_a_class_or_a_parameter():
    head, block = {"PARAMS": "head", "LR_FACTOR": 10}, {"PARAMS": "blocks.0", "LR_FACTOR": 0.5}
    rates = settings(make_cfg([head, block, {"PARAMS": "embed.bias", "LR_FACTOR": 0}]), "lr")
    assert (rates["head.weight"], rates["head.bias"], rates["blocks.0.0.weight"]) == (10, 10, 0.5)
    assert (rates["embed.bias"], rates["embed.weight"], rates["blocks.1.0.weight"]) == (0, 1, 1)
    decays = settings(make_cfg([{"PARAMS": ["Linear"], "WEIGHT_DECAY": 0.3}]), "weight_decay")
    assert (decays["head.bias"], decays["blocks.1.1.weight"]) == (0.3, 0.0)  # norms: WEIGHT_DECAY_NORM


def test_a_regular_expression_is_searched_in_the_name():
    decays = settings(make_cfg([{"REGEX": r"bias$|\.\d\.1\.", "WEIGHT_DECAY": 0.0}]), "weight_decay")
    decayed = {"embed.weight", "blocks.0.0.weight", "blocks.1.0.weight", "head.weight"}
    assert {name for name, decay in decays.items() if decay} == decayed


def test_each_setting_is_that_of_the_first_rule_that_has_it():
    rules = [
        {"PARAMS": "head.bias", "LR_FACTOR": 2},
        {"PARAMS": "head", "LR_FACTOR": 3, "WEIGHT_DECAY": 0.5},
        {"PARAMS": "*.weight", "ARGS": {"betas": [0.5, 0.6], "weight_decay": 0.7}},
    ]
    assert settings(make_cfg(rules), "lr")["head.bias"] == 2
    assert settings(make_cfg(rules), "weight_decay")["head.bias"] == 0.5
    assert settings(make_cfg(rules), "weight_decay")["head.weight"] == 0.5
    assert settings(make_cfg(rules), "weight_decay")["embed.weight"] == 0.7
    assert settings(make_cfg(rules), "betas")["head.weight"] == (0.5, 0.6)
    assert settings(make_cfg(rules), "betas")["head.bias"] == (0.9, 0.999)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({"REGEX": "norm", "LR_FACTOR": 1}, r"PARAM_GROUPS\[0\].REGEX: 'norm'"),
        ({"LR_FACTOR": 1.0}, "PARAMS and REGEX"),
        ({"PARAMS": "head", "LR_FACTOR": -1}, "LR_FACTOR"),
        ({"PARAMS": "head", "ARGS": {"lr": 0.1}}, "LR_FACTOR"),
        ({"PARAMS": "head", "ARGS": {"betos": 0.1}}, "'betos'"),
    ],
)
def test_wrong_rules_are_errors_that_name_the_key(rule, named):
    with pytest.raises(ConfigError, match=named):
        build_optimizer(make_cfg([rule]), Net())
