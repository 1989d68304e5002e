import pytest
import torch
from torch import nn

from hookline.engine.solver import get_default_optimizer_params, reduce_param_groups


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


def test_each_trainable_parameter_is_in_one_group():
    model = Model()
    model.norm.bias.requires_grad_(False)
    groups = get_default_optimizer_params(model)
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len({id(p) for p in groups[0]["params"]}) == 4


def test_norms_biases_and_overrides_get_their_own_values():
    model = Model()
    values = by_name(
        model,
        get_default_optimizer_params(
            model,
            base_lr=1.0,
            weight_decay=0.1,
            weight_decay_norm=0.0,
            bias_lr_factor=2.0,
            weight_decay_bias=0.01,
            overrides={"scale": {"lr": 0.5}},
        ),
    )
    assert values == {
        "scale": {"lr": 0.5, "weight_decay": 0.1},
        "embed.weight": {"lr": 1.0, "weight_decay": 0.1},
        "norm.weight": {"lr": 1.0, "weight_decay": 0.0},
        "norm.bias": {"lr": 2.0, "weight_decay": 0.01},
        "head.bias": {"lr": 2.0, "weight_decay": 0.01},
    }


def test_callers_overrides_are_not_changed():
    overrides = {"scale": {"lr": 0.5}}
    for _ in range(2):
        get_default_optimizer_params(Model(), base_lr=1.0, bias_lr_factor=2.0, overrides=overrides)
    assert overrides == {"scale": {"lr": 0.5}}


def test_learning_rate_factor_follows_the_full_name():
    names = []
    model = Model()
    groups = get_default_optimizer_params(
        model, base_lr=1.0, lr_factor_func=lambda name: names.append(name) or (0.1 if "embed" in name else 1.0)
    )
    assert names == [name for name, _ in model.named_parameters()]
    assert by_name(model, groups)["embed.weight"]["lr"] == 0.1


def test_groups_work_with_an_optimizer():
    groups = get_default_optimizer_params(Model(), base_lr=0.1, weight_decay=0.1, weight_decay_norm=0.0)
    assert len(torch.optim.AdamW(groups).param_groups) == 2


@pytest.mark.parametrize("arguments", [{"bias_lr_factor": 2.0}, {"lr_factor_func": lambda name: 1.0}])
def test_scaling_needs_a_base(arguments):
    with pytest.raises(ValueError, match="base_lr"):
        get_default_optimizer_params(Model(), **arguments)


def test_biases_configured_twice_are_refused():
    with pytest.raises(ValueError, match="bias"):
        get_default_optimizer_params(Model(), weight_decay_bias=0.0, overrides={"bias": {"lr": 1.0}})


def test_equal_groups_are_merged_in_any_order_of_their_settings():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = reduce_param_groups(
        [
            {"params": [a], "lr": 1.0, "weight_decay": 0.0},
            {"params": [b], "lr": 2.0},
            {"weight_decay": 0.0, "lr": 1.0, "params": [c]},
        ]
    )
    assert [group["params"] for group in groups] == [[a, c], [b]]
