"""A failing run ends soon, and its own error is printed last."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forker import forker

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path):
    """Makes workers report and exit instead of waiting for the training process."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, signal\nsignal.alarm = lambda seconds: (os.write(2, b'a worker waits\\n'), os._exit(1))\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


def test_a_run_that_fails_does_not_wait_for_its_loader_workers(tmp_path, environment):
    command = [sys.executable, ROOT / "tools/train_net.py", "--config-file", ROOT / "configs/synthetic/mlp.yaml"]
    options = ["OUTPUT_DIR", tmp_path / "run", "DATALOADER.NUM_WORKERS", 2, "SOLVER.BASE_LR", 1e30]
    options += ["SOLVER.WARMUP_ITERS", 0, "SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.OPTIMIZER.ARGS", "{}"]
    done = subprocess.run(map(str, [*command, *options]), capture_output=True, text=True, env=environment, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "FloatingPointError: the loss is NaN or infinite" in output
    assert "DataLoader worker" not in output
    assert "a worker waits" not in output


@pytest.mark.slow
def test_ranks_that_are_interrupted_do_not_wait_for_their_loader_workers(tmp_path, environment):
    command = [sys.executable, ROOT / "tools/train_net.py", "--config-file", ROOT / "configs/digits/mlp.yaml"]
    command += ["--num-gpus", 2, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", tmp_path / "run", "DATALOADER.NUM_WORKERS", 1]
    process = subprocess.Popen(
        [*map(str, command), "SOLVER.MAX_ITER", "1000000", "TEST.EVAL_PERIOD", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # shells may ignore it
    )
    try:
        output = ""
        while " iter: " not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        process.send_signal(signal.SIGINT)
        output += process.communicate()[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert output.count("Ctrl-C: stopping after this step") == 1
    assert "Training ended at iteration" in output
    assert "a worker waits" not in output


# Files of 16 kB at most: the log fits, a checkpoint does not.
LIMITED = f"""
import resource, runpy

resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
runpy.run_path({str(ROOT / "tools/train_net.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_fails_if_its_last_checkpoint_cannot_be_saved_even_with_on_error_continue(tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    options = f"OUTPUT_DIR {tmp_path}/run SOLVER.MAX_ITER 20 SOLVER.CHECKPOINT_PERIOD 0 CHECKPOINT.ON_ERROR continue"
    command = [tmp_path / "limited.py", "--config-file", ROOT / "configs/synthetic/mlp.yaml", *options.split()]
    command += ["CHECKPOINT.BEST.METRIC", "", "MODEL.ARGS.hidden", "[99]"]
    process = forker.start(command, tmp_path, os.environ)
    code, (output, _) = process.wait(100), process.communicate()
    assert code == 1, output
    assert "model_final.pth: File too large" in output
    assert not (tmp_path / "run/model_final.pth").exists()
