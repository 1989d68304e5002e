"""The command line of tools/lazyconfig_train_net.py."""

import sys

import pytest
from ranks import ROOT, complete, rows
from small_runs import assert_equal_models

pytest.importorskip("omegaconf")

CONFIG = ROOT / "configs" / "synthetic" / "mlp_lazy.py"
SHORT = ("train.max_iter=20", "train.log_period=5", "train.eval_period=10", "train.checkpointer.period=10")


@pytest.fixture
def train(tool):
    return lambda *arguments, config=CONFIG: tool("lazyconfig_train_net.py", "--config-file", config, *arguments)


def test_a_lazy_config_trains_resumes_and_evaluates(train, tmp_path):
    code, out, err = train(*SHORT, "train.output_dir=run")
    assert (code, err) == (0, "")
    whole = rows(tmp_path / "run")
    assert [row["iteration"] for row in whole] == [4, 9, 14, 19, 20]
    assert whole[-1]["synthetic/accuracy"] > 0.4
    assert "completed" in out

    # As if it had been killed after its first checkpoint.
    (tmp_path / "whole").mkdir()
    (tmp_path / "run/model_final.pth").rename(tmp_path / "whole/model_final.pth")
    (tmp_path / "run/last_checkpoint").write_text("model_0000009.pth")
    code, out, err = train(*SHORT, "train.output_dir=run", "--resume")
    assert (code, err) == (0, "")
    assert "Starting training from iteration 10" in out
    assert [row for row in rows(tmp_path / "run") if "total_loss" in row] == [
        row for row in whole if "total_loss" in row
    ]
    assert_equal_models(tmp_path / "run", tmp_path / "whole")

    code, out, err = train("--eval-only", "train.init_checkpoint=whole/model_final.pth", "train.output_dir=look")
    assert (code, err) == (0, "")
    assert f"accuracy  {whole[-1]['synthetic/accuracy']:.5g}" in out


def test_the_saved_config_repeats_the_run(train, tmp_path):
    assert train("train.max_iter=5", "train.seed=-1", "train.output_dir=first")[0] == 0
    assert train("train.output_dir=second", config=tmp_path / "first/config.yaml")[0] == 0
    assert_equal_models(tmp_path / "second", tmp_path / "first")


@pytest.mark.slow
def test_several_ranks_train(tmp_path):
    words = ("--config-file", CONFIG, "--num-gpus", 2, *SHORT, "train.output_dir=run")
    complete([sys.executable, ROOT / "tools/lazyconfig_train_net.py", *words], tmp_path)
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [4, 9, 14, 19, 20]
    assert len(list((tmp_path / "run").glob("events.*"))) == 1
