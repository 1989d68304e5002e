import pytest
import torch
from small_runs import Gan, solver_config
from torch import nn

from hookline.config import ConfigError
from hookline.engine.setup.check import check_config
from hookline.engine.solver import build_lr_scheduler, build_optimizer
from hookline.engine.solver.lengths import scale_config
from hookline.engine.solver.multi_optimizer import OptimizerList, SchedulerList
from hookline.engine.solver.schedules import resolve_lengths


def make_cfg(parts, **solver):
    keys = {"MAX_ITER": 20, "WARMUP_ITERS": 0, "STEPS": (), "BASE_LR": 0.5, "LR_SCHEDULER_NAME": "WarmupLinearLR"}
    return solver_config(**keys, OPTIMIZERS=parts, **solver)


PARTS = {
    "critic": {"PARAMS": "critic", "OPTIMIZER": {"NAME": "Adam", "ARGS": {"betas": [0.5, 0.9]}}, "BASE_LR": 0.1},
    "generator": {"LR_SCHEDULER_NAME": "WarmupConstantLR"},
}


def test_a_part_has_its_own_optimizer_rate_and_schedule_or_those_of_solver():
    cfg, model = make_cfg(PARTS), Gan()
    optimizer = build_optimizer(cfg, model)
    assert isinstance(optimizer, OptimizerList)
    assert list(optimizer.named) == ["critic", "generator"]
    assert (type(optimizer["critic"]), type(optimizer[1])) == (torch.optim.Adam, torch.optim.SGD)
    assert tuple(optimizer["critic"].defaults["betas"]) == (0.5, 0.9)
    own = [parameter for group in optimizer["generator"].param_groups for parameter in group["params"]]
    assert own == list(model.generator.parameters())
    schedules = build_lr_scheduler(cfg, optimizer)
    assert isinstance(schedules, SchedulerList)
    for _ in range(10):
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert [one.param_groups[0]["lr"] for one in optimizer] == pytest.approx([0.05, 0.5])


def test_lengths_of_parts_are_resolved_and_scaled():
    parts = {"critic": {"PARAMS": "critic", "WARMUP_ITERS": "2ep", "STEPS": ["3ep", 5]}, "rest": {}}
    parts["rest"] = {"LR_SCHEDULER_NAME": "WarmupStepLR", "LR_SCHEDULER_ARGS": {"step_size": "1ep"}}
    resolved = resolve_lengths(make_cfg(parts), 10).SOLVER.OPTIMIZERS
    assert (resolved.critic.WARMUP_ITERS, tuple(resolved.critic.STEPS)) == (20, (30, 5))
    assert resolved.rest.LR_SCHEDULER_ARGS.step_size == 10
    cfg = make_cfg({"critic": {"PARAMS": "critic", "BASE_LR": 0.1}, "rest": {}}, REFERENCE_WORLD_SIZE=1)
    scaled = scale_config(cfg, 2).SOLVER
    assert (scaled.BASE_LR, scaled.OPTIMIZERS.critic.BASE_LR) == (1.0, 0.2)
    assert "BASE_LR" not in scaled.OPTIMIZERS.rest  # that of SOLVER


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": {"PARAMS": "criitc"}, "b": {}}, "OPTIMIZERS.a.PARAMS: .*'critic'"),
        ({"a": {"PARAMS": "critic"}}, "OPTIMIZERS: generator.weight and 1 others"),
        ({"a": {"PARAMS": "critic"}, "b": {"PARAMS": "Linear"}}, "OPTIMIZERS.b.PARAMS: critic.weight"),
        ({"a": {"BASE_LRR": 1}}, "OPTIMIZERS.a.BASE_LRR: "),
        ({"a": {"OPTIMIZER": {"NAME": "Adma"}}}, "OPTIMIZERS.a: .*'Adamax'"),
    ],
)
def test_wrong_parts_are_errors_that_name_the_key(parts, message):
    def build():
        cfg = make_cfg(parts)
        check_config(cfg)
        build_optimizer(cfg, Gan())

    with pytest.raises(ConfigError, match=message):
        build()


def test_the_names_of_a_saved_list_must_be_the_same():
    def make(*names):
        return OptimizerList({name: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for name in names})

    state = make("a", "b").state_dict()
    make("b", "a").load_state_dict(state)  # in another order
    with pytest.raises(ValueError, match=r"a, b.*a, c"):
        make("a", "c").load_state_dict(state)
