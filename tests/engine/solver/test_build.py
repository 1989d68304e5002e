import copy

import pytest
import torch
from fvcore.common.config import CfgNode as FvcoreCfgNode
from omegaconf import OmegaConf
from small_runs import solver_config
from torch import nn

from hookline.config import CfgNode, ConfigError
from hookline.engine.setup.check import check_config
from hookline.engine.solver import build_lr_scheduler, build_optimizer
from hookline.engine.solver.clipping import clipper_of

FUSED = {"SGD", "Adam", "Adagrad", *("AdamW",) * issubclass(torch.optim.AdamW, torch.optim.Adam)}  # not in torch 2.6
TORCHS = [n for n, o in vars(torch.optim).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)]


def make_cfg(name="SGD", args=None, **solver):
    return solver_config(OPTIMIZER={"NAME": name, "ARGS": args or {}}, **solver)


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", sorted({*TORCHS} - {"Optimizer", "LBFGS"}))
def test_every_optimizer_of_torch_trains_by_its_name(name):
    model = make_model() if name not in ("Muon", "SparseAdam") else nn.Linear(3, 2, bias=False)
    if name == "SparseAdam":
        model = nn.Embedding(5, 2, sparse=True)
    before = [parameter.clone() for parameter in model.parameters()]
    cfg = make_cfg(name, BASE_LR=0.1)
    check_config(cfg)
    optimizer = build_optimizer(cfg, model)
    model(torch.arange(5) if name == "SparseAdam" else torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    assert type(optimizer).__name__ == name
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert bool(optimizer.defaults.get("fused")) == (name in FUSED)


@pytest.mark.skipif("Muon" not in TORCHS, reason="this torch has no Muon")
def test_muon_takes_matrices_and_another_optimizer_the_rest():
    cfg = make_cfg("torch.optim:Muon")
    with pytest.raises(ConfigError, match=r"SOLVER.OPTIMIZER .*Muon.*2D"):
        build_optimizer(cfg, make_model())
    cfg.merge_from_list(["SOLVER.OPTIMIZERS", {"matrices": {"PARAMS": ["0.weight", "2.weight"]}}])
    cfg.merge_from_list(["SOLVER.OPTIMIZERS.rest", {"OPTIMIZER": {"NAME": "AdamW"}}])
    assert [type(one).__name__ for one in build_optimizer(cfg, make_model())] == ["Muon", "AdamW"]


@pytest.mark.parametrize(("argument", "value"), [("weight_decay", 0.2), ("nesterov", True)])
def test_of_two_different_values_that_of_the_optimizer_has_precedence(argument, value, caplog):
    own = type(value)(0)
    cfg = make_cfg(args={argument: own}, **{argument.upper(): value})
    check_config(cfg)
    assert build_optimizer(cfg, make_model()).defaults[argument] == own
    assert f"SOLVER.{argument.upper()}: {value} has no effect on SGD with ARGS" in caplog.text


@pytest.mark.parametrize(
    ("cfg", "key"),
    [
        (make_cfg("AdamW", NESTEROV=True), "NESTEROV"),
        (make_cfg("Rprop", WEIGHT_DECAY=0.2), "WEIGHT_DECAY"),
        (make_cfg("RMSprop", {"momentum": 0.1}, MOMENTUM=0.5), "MOMENTUM"),
        (make_cfg(LR_SCHEDULER_METRIC="test/loss"), "LR_SCHEDULER_METRIC"),
        (make_cfg(LR_SCHEDULER_INTERVAL="epoch"), "LR_SCHEDULER_INTERVAL"),
    ],
)
def test_keys_of_a_base_config_that_do_not_apply_are_a_warning(cfg, key, caplog):
    check_config(cfg)
    build_lr_scheduler(cfg, build_optimizer(cfg, make_model()))
    warnings = [record.getMessage() for record in caplog.records if "STEPS" not in record.getMessage()]
    assert [warning.split(":")[0] for warning in warnings] == [f"SOLVER.{key}"]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2, dtype=torch.complex64), nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 2, device="meta")],
)
def test_parameters_without_a_fused_step_are_not_fused(model):
    assert not build_optimizer(make_cfg(), model).defaults["fused"]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (make_cfg("AdamW", {"eps_": 2.0}), r"SOLVER\.OPTIMIZER\.ARGS\.eps_"),
        (make_cfg(LR_SCHEDULER_ARGS={"power": 2.0}), r"SOLVER\.LR_SCHEDULER_ARGS\.power"),
        (make_cfg(LR_SCHEDULER_NAME="torch.optim.lr_scheduler:ExponentialLR"), "gamma"),
    ],
)
def test_wrong_settings_are_found_without_building(cfg, message):
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match=r"SOLVER\.OPTIMIZER\.NAME: LBFGS"):
        build_optimizer(make_cfg("torch.optim:LBFGS"), make_model())


def test_a_parameter_may_have_its_first_gradient_in_a_later_step():
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    reference = copy.deepcopy(model)
    optimizer = build_optimizer(make_cfg(BASE_LR=0.1, WEIGHT_DECAY=0.0), model)
    assert optimizer.param_groups[0]["fused"]
    other = torch.optim.SGD(reference.parameters(), 0.1, 0.9, fused=False)
    for trained, one in ((model, optimizer), (reference, other)):
        for used in (1, 2, 2):
            one.zero_grad()
            sum(part(torch.ones(2, 3)).mean() for part in trained[:used]).backward()
            one.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_configs_with_detectron2s_keys_only_build_optimizer_schedule_and_clipping():
    solver = {"BASE_LR": 0.02, "MOMENTUM": 0.5, "WEIGHT_DECAY_NORM": 0.0, "WEIGHT_DECAY_BIAS": None, "MAX_ITER": 10}
    solver |= {"STEPS": [2], "GAMMA": 0.1, "WARMUP_ITERS": 0, "LR_SCHEDULER_NAME": "WarmupMultiStepLR"}
    solver |= {"IMS_PER_BATCH": 16, "CLIP_GRADIENTS": {"ENABLED": True, "CLIP_TYPE": "norm", "CLIP_VALUE": 1}}
    for cfg in (FvcoreCfgNode({"SOLVER": solver}), OmegaConf.create({"SOLVER": solver}), CfgNode({"SOLVER": solver})):
        optimizer = build_optimizer(cfg, nn.Linear(2, 2))
        schedule = build_lr_scheduler(cfg, optimizer)
        rates = [optimizer.param_groups[0]["lr"] for _ in range(3) if schedule.step() is None]
        assert rates == pytest.approx([0.02, 0.002, 0.002])
        assert optimizer.param_groups[0]["momentum"] == 0.5
        assert clipper_of(optimizer).keywords["kind"] == "param_norm"  # detectron2's meaning of "norm"
