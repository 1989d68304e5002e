"""Checkpoints without frozen weights: smaller, exact at a resume, and never with other frozen weights."""

import os

import pytest
import torch
from one_call import one_call, points
from run_tools import run_tool
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import checkpointer_for
from hookline.engine.program.export import export_weights
from hookline.hooks import EMA, CallbackHook


class Net(nn.Module):
    """Its body is frozen, and made from a seed of its own, as weights that a constructor loads."""

    def __init__(self, seed=5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Linear(4, 256).requires_grad_(False)
        self.head = nn.Linear(256, 3)

    def forward(self, x):
        return self.head(self.body(x))


def run(folder, length=10, seed=5, only=True, hooks=(), resume=True, model=Net, **config):
    config = {"CHECKPOINT": {"TRAINABLE_ONLY": only}, **config}
    options = {"lr": 0.1, "length": length, "batch_size": 16, "hooks": hooks, "config": config}
    trainer = one_call(folder, lambda: model(seed), points(64), **options)
    trainer.train(resume=resume)
    return trainer.model.state_dict()


def turned(seed):
    net = Net(seed)
    net.body.weight.data = net.body.weight.data.flip(0)
    return net


def adapted(seed):
    """An adapter of peft."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(seed), peft.LoraConfig(target_modules=["body"], r=2))


@pytest.mark.parametrize(
    ("model", "trained"), [(Net, {"head"}), pytest.param(adapted, {"lora_A", "lora_B"}, marks=pytest.mark.slow)]
)
def test_a_resume_is_exact_and_the_files_hold_only_what_is_trained(tmp_path, model, trained):
    whole = run(tmp_path / "whole", only=False, model=model)
    run(tmp_path / "parts", 5, model=model)
    resumed = run(tmp_path / "parts", model=model)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    path = tmp_path / "parts" / "model_final.pth"
    saved = torch.load(path)["model"]
    assert all(trained & set(name.split(".")) for name in saved)
    assert export_weights(path, tmp_path / "adapter.safetensors").weights == len(saved) == 2
    assert os.path.getsize(path) < os.path.getsize(tmp_path / "whole" / "model_final.pth")


def test_other_frozen_weights_and_a_model_without_any_are_refused(tmp_path):
    run(tmp_path / "run", 5)
    with pytest.raises(ConfigError, match="TRAINABLE_ONLY"):
        run(tmp_path / "run", seed=6)
    with pytest.raises(ConfigError, match="TRAINABLE_ONLY"):
        run(tmp_path / "run", model=turned)  # the same numbers at other places
    with pytest.raises(ConfigError, match="TRAINABLE_ONLY"):
        run(tmp_path / "other", model=lambda seed: nn.Linear(4, 3))


def test_without_an_optimizer_all_weights_are_saved(tmp_path):
    net, other = Net(5), Net(6)
    checkpointer_for(net, str(tmp_path), optimizer=None).save("whole")
    checkpointer_for(other).load(str(tmp_path / "whole.pth"))
    assert torch.equal(other.body.weight, net.body.weight)


def test_a_second_stage_resumes_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Net(9).state_dict(), "base.pth")
    run("first", 5, seed=7, MODEL={"WEIGHTS": "base.pth"})
    second = {"MODEL": {"WEIGHTS": "first/model_final.pth"}}
    run(tmp_path / "second", 5, seed=8, **second)
    monkeypatch.chdir("/")
    second["MODEL"]["WEIGHTS"] = str(tmp_path / second["MODEL"]["WEIGHTS"])
    resumed = run(tmp_path / "second", seed=6, **second)
    assert torch.equal(resumed["body.weight"], Net(9).body.weight)


def test_a_frozen_weight_that_a_hook_changes_cannot_be_left_out(tmp_path):
    follow = CallbackHook(after_step=lambda trainer: trainer.model.body.weight.data.add_(1))
    with pytest.raises(ConfigError, match=r"TRAINABLE_ONLY.*body\.weight"):
        run(tmp_path / "run", hooks=[follow], resume=False)


def averaged(path):
    """A run that evaluated an average of the weights that are frozen later."""
    run(path, 5, only=False, hooks=[EMA(decay=0.9)], model=lambda seed: Net(9).requires_grad_(True))


def wrapped(path):
    torch.save({f"module.{name}": value for name, value in Net(9).state_dict().items()}, path)


@pytest.mark.parametrize("write", [averaged, wrapped])
def test_frozen_weights_are_read_as_they_were_at_first_also_after_a_move(tmp_path, write):
    base, moved = tmp_path / "base", tmp_path / "moved"
    write(base)
    first = run(tmp_path / "run", 5, hooks=[EMA(decay=0.9)], MODEL={"WEIGHTS": str(base)})
    run(tmp_path / "run", 7, hooks=[EMA(decay=0.9)], MODEL={"WEIGHTS": ""})
    base.rename(moved)
    last = run(tmp_path / "run", 9, hooks=[EMA(decay=0.9)], MODEL={"WEIGHTS": str(moved)})
    assert torch.equal(first["body.weight"], last["body.weight"])
    assert export_weights(tmp_path / "run", tmp_path / "average.pth", weights="averaged").weights == 2


def test_such_a_checkpoint_as_the_weights_of_a_run_names_a_source_that_is_gone(tmp_path):
    base = tmp_path / "base"
    wrapped(base)
    run(tmp_path / "run", 5, MODEL={"WEIGHTS": str(base)})
    base.unlink()
    with pytest.raises(ConfigError, match="put that file back"):
        run(tmp_path / "next", 5, MODEL={"WEIGHTS": str(tmp_path / "run" / "model_final.pth")})


def test_frozen_weights_that_a_hook_loads_are_loaded_again_at_a_resume(tmp_path):
    other = tmp_path / "other.pth"
    torch.save({"body.weight": Net(9).body.weight}, other)

    def load(trainer):
        if trainer.iter == 3:
            trainer.checkpointer.load(str(other))

    run(tmp_path / "run", 6, hooks=[CallbackHook(before_step=load)], SOLVER={"CHECKPOINT_PERIOD": 2})
    resumed = run(tmp_path / "run", 8)
    assert torch.equal(resumed["body.weight"], Net(9).body.weight)
    assert torch.equal(resumed["body.bias"], Net().body.bias)


class Adapted(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 4))


def test_the_command_evaluates_such_a_run_and_refuses_its_own_folder_as_the_base(tmp_path, capfd):
    def tool(*arguments):
        return run_tool("train_net.py", [*common, *arguments], capfd)

    torch.save(Adapted().state_dict(), tmp_path / "base.pth")
    common = ["--config-file", "synthetic/mlp.yaml", "MODEL.NAME", f"{__name__}:Adapted", "MODEL.ARGS", "{}"]
    common += ["OUTPUT_DIR", str(tmp_path / "run"), "SOLVER.MAX_ITER", "6", "CHECKPOINT.TRAINABLE_ONLY", "True"]
    assert tool("MODEL.WEIGHTS", str(tmp_path / "base.pth"))[0] == 0
    assert tool("MODEL.WEIGHTS", str(tmp_path / "run"), "--eval-only")[0] == 0
    whole = ["OUTPUT_DIR", str(tmp_path / "whole"), "MODEL.WEIGHTS", str(tmp_path / "base.pth")]
    assert tool(*whole, "CHECKPOINT.TRAINABLE_ONLY", "False")[0] == 0
    before = (tmp_path / "whole/model_final.pth").read_bytes()
    code, _, error = tool(*whole, "SOLVER.MAX_ITER", "9", "--resume")
    assert (code, "TRAINABLE_ONLY" in error) == (2, True)
    assert (tmp_path / "whole/model_final.pth").read_bytes() == before
