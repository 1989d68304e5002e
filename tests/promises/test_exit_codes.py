"""Exit codes: 75 after a signal of a scheduler, 130 after Ctrl-C, 1 after a failure. All is saved, nothing waits."""

import json
import os
import signal
import sys
import time

import pytest
import torch
from ranks import HOOKLINE, ROOT, SYNTHETIC, finish, fork, wait_for
from ranks import start as start_new

# A hook that sends a signal to its process at an event, and other parts.
HOOK = '''
import os, signal, time
from hookline.config import ConfigError
from hookline.hooks import HookBase

class Send(HookBase):
    def __init__(self, event: str, at: int, name: str, times: int = 1):
        self.at, self.number, self.left = at, getattr(signal, name), times
        if event == "init":
            os.kill(os.getpid(), self.number)
        else:
            setattr(self, event, self.send)

    def send(self, *_):
        if self.trainer.iter == self.at and self.left:
            for _ in range(self.left):
                os.kill(os.getpid(), self.number)
            self.left = 0

class Wait(HookBase):
    def after_fetch(self, batch):
        if self.trainer.iter == 13:
            with open("here", "w") as file:
                file.write("here")
            while not os.path.exists("go"):
                time.sleep(0.02)

class Impatient(HookBase):
    """Makes the loader's workers report and exit instead of waiting for the training process."""
    def __init__(self):
        signal.alarm = lambda seconds: (os.write(2, b"a worker waits"), os._exit(1))

class Fail(HookBase):
    def __init__(self, at: int, says: str = ""):
        self.at, self.says = at, says

    def before_forward(self, batch):
        if self.trainer.iter == self.at:
            raise ConfigError(self.says) if self.says else RuntimeError("broken")
'''


@pytest.fixture
def start(tmp_path):
    """Start a script of tools/, forked unless the test is about its imports."""
    (tmp_path / "hook.py").write_text(HOOK)

    def start(*arguments, hook=None, name="Send", tool="train_net.py", start=fork):
        hooks = [{"NAME": f"hook:{name}", "ARGS": hook or {}}] if hook or name != "Send" else []
        command = [
            *(sys.executable, ROOT / "tools" / tool, *(["train"] if tool == HOOKLINE else [])),
            *("--config-file", SYNTHETIC, "OUTPUT_DIR", "run", "SOLVER.MAX_ITER", 40, "SOLVER.CHECKPOINT_PERIOD", 10),
            *(("LOG.WRITERS", '["JSONWriter"]') if tool != "plain_train_net.py" else ()),  # the plain loop has its own
            *("HOOKS", hooks, *arguments),
        ]
        return start(command, tmp_path, apart=True)

    return start


@pytest.fixture
def run(start):
    """Run a script of tools/; return its exit code, standard output and standard error."""
    return lambda *arguments, **options: finish(start(*arguments, **options))


def last(folder):
    return (folder / "run" / "last_checkpoint").read_text()


def held(folder):
    return torch.load(folder / "run" / last(folder), weights_only=True)["iteration"]


def test_a_run_stopped_by_sigterm_exits_with_75_and_is_completed_by_a_resume(run, tmp_path):
    code, out, err = run(hook={"event": "before_step", "at": 13, "name": "SIGTERM"})
    assert code == 75, err
    assert err == "SIGTERM: stopping after this step\n"
    assert "Training ended at iteration 14: interrupted by SIGTERM" in out
    assert last(tmp_path) == "model_0000013.pth"
    code, out, err = run("--resume")
    assert (code, err) == (0, "")
    assert "Starting training from iteration 14\n" in out
    assert last(tmp_path) == "model_final.pth"


@pytest.mark.parametrize(("at", "code"), [(0, 2), (13, 1)])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_input_after_the_first_step_is_a_failure_that_can_be_resumed(run, at, code, ranks):
    options = ("--num-gpus", ranks, "MODEL.DEVICE", "cpu") if ranks > 1 else ()
    ended, _, err = run(*options, name="Fail", hook={"at": at, "says": "these samples do not fit"})
    assert (ended, "Traceback" in err) == (code, False)
    assert err.startswith("error: these samples do not fit\n")
    assert ("continue with --resume" in err) == (code == 1)


@pytest.mark.slow
def test_ctrl_c_once_exits_with_130_and_a_checkpoint_and_twice_without(run, tmp_path):
    code, _, err = run(hook={"event": "before_step", "at": 13, "name": "SIGINT"})
    assert code == 130, err
    assert held(tmp_path) == 13
    code, _, err = run("--resume", hook={"event": "before_step", "at": 15, "name": "SIGINT", "times": 2})
    assert code == 130
    assert "Traceback" not in err
    assert held(tmp_path) == 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "at", "code", "iteration"),
    [
        ("before_eval_step", 19, 75, 19),  # the evaluation is finished first
        ("after_train", 40, 0, 39),  # nothing is left to stop
        ("after_run", 40, 75, 39),  # all is saved, but final results may not have been printed
    ],
)
def test_a_signal_at_any_point_of_a_run_stops_it_cleanly(run, tmp_path, event, at, code, iteration):
    hook = {"event": event, "at": at, "name": "SIGUSR1"}
    result, _, err = run("TEST.EVAL_PERIOD", 20, "LOG.PERIOD", 20, hook=hook)
    assert result == code, err
    assert "Traceback" not in err
    assert held(tmp_path) == iteration
    names = [path.name for path in (tmp_path / "run").iterdir()]
    assert not [name for name in names if ".tmp" in name]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    assert any("synthetic/accuracy" in row for row in rows)


@pytest.mark.slow
def test_a_signal_before_training_exits_with_75_and_leaves_nothing_to_resume(run, tmp_path):
    code, _, err = run(hook={"event": "init", "at": 0, "name": "SIGTERM"})
    assert code == 75
    assert err.startswith("SIGTERM: ")
    assert "--resume" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "last_checkpoint").exists()
    assert run("--resume")[0] == 0


# Replaces torch, or is imported first by Python: then ranks that launch() starts wait in it.
SLOW_IMPORT = """
import os, sys, time
if {when}:
    open(f"importing.{{os.getpid()}}", "w").close()
    time.sleep({seconds})
"""
TORCH = ("torch.py", SLOW_IMPORT.format(when=True, seconds=60))
RANKS = ("sitecustomize.py", SLOW_IMPORT.format(when='"spawn_main" in " ".join(sys.orig_argv)', seconds=2))


@pytest.mark.parametrize(
    ("module", "ranks", "name", "expected", "tool"),
    [
        (TORCH, 1, "SIGUSR1", 75, "train_net.py"),
        (TORCH, 1, "SIGINT", 130, HOOKLINE),
        pytest.param(RANKS, 2, "SIGTERM", 75, "train_net.py", marks=pytest.mark.slow),
    ],
    ids=["SIGUSR1", "SIGINT", "ranks"],
)
def test_a_signal_during_the_imports_has_the_same_exit_code(start, tmp_path, module, ranks, name, expected, tool):
    (tmp_path / module[0]).write_text(module[1])
    process = start("--num-gpus", ranks, "MODEL.DEVICE", "cpu", start=start_new, tool=tool)
    while len(list(tmp_path.glob("importing.*"))) < ranks:
        time.sleep(0.02)
    os.killpg(process.pid, getattr(signal, name))
    code, _, err = finish(process)
    assert code == expected, err
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "last_checkpoint").exists()


@pytest.mark.slow
def test_a_signal_to_the_process_group_lets_workers_finish_the_step(start, tmp_path):
    """The signal reaches the loader's workers too, as from schedulers and terminals."""
    process = start("DATALOADER.NUM_WORKERS", 2, name="Wait")
    wait_for(process, tmp_path / "here")
    os.killpg(process.pid, signal.SIGINT)
    (tmp_path / "go").write_text("")
    code, _, err = finish(process)
    assert code == 130, err
    assert err.count("stopping after this step") == 1
    assert held(tmp_path) == 13


@pytest.mark.slow
def test_a_time_limit_exits_with_75_and_a_checkpoint(run, tmp_path):
    arguments = ["SOLVER.TIME_LIMIT", "6s", "SOLVER.MAX_ITER", 10**8, "SOLVER.CHECKPOINT_PERIOD", 0]
    code, out, err = run(*arguments)
    assert code == 75, err
    assert "the time limit of 6s is near" in out
    assert held(tmp_path) >= 0


@pytest.mark.slow
def test_a_failure_exits_with_1_and_a_resume_uses_the_last_checkpoint(run, tmp_path):
    code, _, err = run("CHECKPOINT.ON_EXCEPTION", True, name="Fail", hook={"at": 13})
    assert code == 1
    assert "RuntimeError: broken" in err
    assert held(tmp_path) == 9
    state = torch.load(tmp_path / "run" / "model_exception.pth", weights_only=True)
    assert state["iteration"] == state["trainer"]["iteration"] == 12


@pytest.mark.slow
def test_the_plain_loop_has_the_same_exit_codes(start, run, tmp_path):
    process = start("SOLVER.MAX_ITER", 10**8, tool="plain_train_net.py")
    wait_for(process, tmp_path / "run" / "last_checkpoint")
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 75, err
    assert "interrupted by SIGTERM" in out
    assert last(tmp_path) == f"model_{held(tmp_path):07d}.pth"
    code, out, err = run("--resume", "SOLVER.MAX_ITER", held(tmp_path) + 5, tool="plain_train_net.py")
    assert code == 0, err


# ---------------------------------------------------------------------- nothing waits for loader workers


@pytest.mark.slow
def test_a_run_that_fails_does_not_wait_for_its_workers(run):
    options = ("SOLVER.BASE_LR", 1e30, "SOLVER.WARMUP_ITERS", 0, "SOLVER.OPTIMIZER.NAME", "SGD")
    code, out, err = run("DATALOADER.NUM_WORKERS", 2, *options, "SOLVER.OPTIMIZER.ARGS", "{}", name="Impatient")
    assert code == 1, err
    assert "FloatingPointError: the loss is NaN or infinite" in out + err
    assert "DataLoader worker" not in out + err
    assert "a worker waits" not in out + err


@pytest.mark.slow
def test_ranks_that_are_interrupted_do_not_wait_for_their_workers(start, tmp_path):
    options = ("--num-gpus", 2, "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", 10**6, "TEST.EVAL_PERIOD", 0, "LOG.PERIOD", 1)
    process = start(*options, "DATALOADER.NUM_WORKERS", 1, "SOLVER.CHECKPOINT_PERIOD", 0, name="Impatient")
    wait_for(process, tmp_path / "run" / "metrics.json")
    os.kill(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert (out + err).count("Ctrl-C: stopping after this step") == 1
    assert "Training ended at iteration" in out
    assert "a worker waits" not in out + err


# Files of 16 kB at most: the log fits, a checkpoint does not.
LIMITED = f"""
import resource, runpy

resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
runpy.run_path({str(ROOT / "tools/train_net.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_fails_if_its_last_checkpoint_cannot_be_saved_even_with_continue(run, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    options = ("SOLVER.MAX_ITER", 20, "SOLVER.CHECKPOINT_PERIOD", 0, "CHECKPOINT.ON_ERROR", "continue")
    options += ("CHECKPOINT.BEST.METRIC", "", "MODEL.ARGS.hidden", "[99]")
    code, out, err = run(*options, tool=tmp_path / "limited.py")
    assert code == 1, out + err
    assert "model_final.pth: File too large" in out + err
    assert not (tmp_path / "run/model_final.pth").exists()
