"""The example configs: all are valid, and those with data of their own train."""

import json
from pathlib import Path

import pytest
from run_tools import run_tool

from hookline.config import get_cfg
from hookline.engine.setup.check import check_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    str(path.relative_to(ROOT / "configs"))
    for path in (ROOT / "configs").glob("*/*.yaml")
    if path.parent.name != "project"  # which "hookline new" copies
)
NEEDS = {"images": "PIL", "huggingface": "transformers", "digits": "sklearn", "tabular": "sklearn"}


def needs(config):
    if package := NEEDS.get(config.partition("/")[0]):
        pytest.importorskip(package)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_is_valid_in_any_folder_and_in_the_table(config, monkeypatch, tmp_path):
    needs(config)
    assert f"`{config}`" in (ROOT / "docs/examples.md").read_text()
    monkeypatch.chdir(tmp_path)
    cfg = get_cfg()
    cfg.merge_from_file(str(ROOT / "configs" / config))
    check_config(cfg)


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Train as a user does; return the last value of each metric, and what was printed."""
    monkeypatch.chdir(tmp_path)
    quick = ("LOG.PROGRESS_BAR", "False", "TEST.EVAL_PERIOD", "0", "SOLVER.CHECKPOINT_PERIOD", "0")

    def train(config, *options):
        needs(config)
        arguments = ["--config-file", ROOT / "configs" / config, *quick, "CHECKPOINT.BEST.METRIC", "", *options]
        code, out, err = run_tool("train_net.py", arguments, capsys)
        assert code == 0, out + err
        metrics = tmp_path / "output" / config.removesuffix(".yaml").replace("/", "_") / "metrics.json"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return {name: value for row in rows for name, value in row.items()}, out

    return train


SMALL_GPT = (
    *("MODEL.ARGS.width", "16", "MODEL.ARGS.depth", "1", "DATALOADER.LIMIT_TEST_BATCHES", "2"),
    *("SOLVER.MAX_ITER", "40", "SOLVER.BASE_LR", "0.02"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options", "metric", "least", "most"),
    [
        ("tabular/diabetes.yaml", (), "diabetes/mean_squared_error", 0, 0.6),
        ("gan/rings.yaml", ("SOLVER.MAX_ITER", "30ep"), "ring/distance", 0, 0.1),
        ("huggingface/bert.yaml", (), "lines/accuracy", 0.65, 1),
        ("language/gpt.yaml", SMALL_GPT, "python_docs/loss", 0, 4.5),  # 5.5 at first
    ],
)
def test_an_example_learns(train, config, options, metric, least, most):
    metrics, _ = train(config, *options)
    assert least <= metrics[metric] <= most


@pytest.mark.slow
def test_features_are_transferred_and_unfrozen_in_stages(train):
    assert train("images/shapes.yaml", "SOLVER.MAX_ITER", "6ep")[0]["shapes/accuracy"] > 0.8
    metrics, log = train("images/transfer.yaml", "MODEL.WEIGHTS", "output/images_shapes/model_final.pth")
    assert metrics["signs/accuracy"] > 0.7
    assert "classifier.weight" in log
    assert "ModelFreezer" in log
