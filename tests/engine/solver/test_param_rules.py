import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.solver import build_lr_scheduler, build_optimizer, check_solver


class Net(nn.Module):
    """An embedding, two blocks with a norm each, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.head = nn.Linear(4, 3)


def make_cfg(rules=(), **solver):
    cfg = get_cfg()
    cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
    cfg.SOLVER.BASE_LR, cfg.SOLVER.WEIGHT_DECAY = 1.0, 0.1
    cfg.SOLVER.PARAM_GROUPS = list(rules)
    cfg.merge_from_list([part for key, value in solver.items() for part in (f"SOLVER.{key}", value)])
    return cfg


def settings(cfg, name, model=None):
    """The setting of each parameter, by its name."""
    model = model or Net()
    optimizer = build_optimizer(cfg, model)
    of = {p: group[name] for group in optimizer.param_groups for p in group["params"]}
    return {key: of[parameter] for key, parameter in model.named_parameters()}


def test_a_pattern_names_a_submodule_a_class_or_a_parameter():
    cfg = make_cfg(
        [
            {"PARAMS": "head", "LR_FACTOR": 10},
            {"PARAMS": "blocks.0", "LR_FACTOR": 0.5},
            {"PARAMS": "embed.bias"} | zero(),
        ]
    )
    rates = settings(cfg, "lr")
    assert (rates["head.weight"], rates["head.bias"], rates["blocks.0.0.weight"]) == (10, 10, 0.5)
    assert (rates["embed.bias"], rates["embed.weight"], rates["blocks.1.0.weight"]) == (0, 1, 1)
    decays = settings(make_cfg([{"PARAMS": ["Linear"], "WEIGHT_DECAY": 0.3}]), "weight_decay")
    assert (decays["head.bias"], decays["blocks.1.1.weight"]) == (0.3, 0.0)  # norms: WEIGHT_DECAY_NORM


def zero():
    return {"LR_FACTOR": 0}


def test_a_regular_expression_is_searched_in_the_name():
    decays = settings(make_cfg([{"REGEX": r"bias$|\.\d\.1\.", "WEIGHT_DECAY": 0.0}]), "weight_decay")
    assert {name for name, decay in decays.items() if decay} == {
        "embed.weight",
        "blocks.0.0.weight",
        "blocks.1.0.weight",
        "head.weight",
    }


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


def test_layer_wise_decay_counts_from_the_last_layer():
    layers = {"LAYER_DECAY.FACTOR": 0.5, "LAYER_DECAY.LAYERS": ["embed", "blocks.*", "head"]}
    rates = settings(make_cfg([{"PARAMS": "head.bias", "LR_FACTOR": 3}], **layers), "lr")
    assert [rates[f"{name}.weight"] for name in ("embed", "blocks.0.0", "blocks.0.1", "blocks.1.0", "head")] == [
        0.125,
        0.25,
        0.25,
        0.5,
        1.0,
    ]
    assert rates["head.bias"] == 3.0


def test_the_schedule_multiplies_every_rate():
    cfg = make_cfg(
        [{"PARAMS": "head", "LR_FACTOR": 10}], LR_SCHEDULER_NAME="WarmupLinearLR", MAX_ITER=4, WARMUP_ITERS=0
    )
    optimizer = build_optimizer(cfg, Net())
    scheduler = build_lr_scheduler(cfg, optimizer)
    optimizer.step()
    scheduler.step()
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.75, 7.5]


@pytest.mark.parametrize(
    ("rules", "solver", "message"),
    [
        ([{"PARAMS": "haed", "LR_FACTOR": 1}], {}, r"SOLVER.PARAM_GROUPS\[0\].PARAMS: .*did you mean 'head'"),
        ([{"REGEX": "norm", "LR_FACTOR": 1}], {}, r"PARAM_GROUPS\[0\].REGEX: 'norm' is found in no .*embed.weight"),
        ([{"REGEX": "(", "LR_FACTOR": 1}], {}, "'[(]' is not a regular expression"),
        ([{"PARAMS": "head", "LR_FACTER": 1}], {}, "PARAM_GROUPS.0..LR_FACTER: there is no such key; did you mean"),
        ([{"PARAMS": "head"}], {}, "sets nothing"),
        ([{"LR_FACTOR": 1.0}], {}, "one of PARAMS and REGEX"),
        ([{"PARAMS": "head", "LR_FACTOR": -1}], {}, "LR_FACTOR: expected a number"),
        ([{"PARAMS": "head", "ARGS": {"lr": 0.1}}], {}, "use LR_FACTOR"),
        ([{"PARAMS": "head", "ARGS": {"betos": 0.1}}], {}, "AdamW has no setting 'betos'; did you mean 'betas'"),
        (["head"], {}, "a rule is a mapping"),
        ([], {"LAYER_DECAY.FACTOR": 0.5}, "LAYER_DECAY.LAYERS is empty"),
        ([], {"LAYER_DECAY.FACTOR": 0.5, "LAYER_DECAY.LAYERS": ["block.*"]}, "LAYER_DECAY.LAYERS: .*'block"),
    ],
)
def test_wrong_rules_are_errors_that_name_the_key(rules, solver, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(make_cfg(rules, **solver), Net())


def test_the_form_of_rules_is_checked_before_a_model_is_built():
    with pytest.raises(ConfigError, match="sets nothing"):
        check_solver(make_cfg([{"PARAMS": "head"}]))


def test_without_rules_the_groups_are_the_usual_ones():
    torch.manual_seed(0)
    model = Net()
    assert [len(group["params"]) for group in build_optimizer(make_cfg(), model).param_groups] == [8, 4]
