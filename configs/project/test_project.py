"""Run with: python -m pytest"""

from pathlib import Path

import pytest

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer


def test_a_short_run_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)  # the config names modules of this folder
    cfg = get_cfg()
    cfg.merge_from_file("config.yaml")
    cfg.merge_from_list(["SOLVER.MAX_ITER", "3ep", "OUTPUT_DIR", str(tmp_path / "run")])
    result = DefaultTrainer(cfg).train()
    assert result.reason == "completed"
    assert result.metrics["test/accuracy"] > 0.9
    assert result.metrics["weight_norm"] > 0
