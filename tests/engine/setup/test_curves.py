"""``LOG.CURVES``."""

import pytest
from small_runs import config_trainer

from hookline.engine.setup import report

pytest.importorskip("matplotlib")


def train(folder, *overrides):
    trainer = config_trainer(folder, "LOG.WRITERS", ["JSONWriter"], "LOG.PERIOD", 1, "SOLVER.MAX_ITER", 3, *overrides)
    trainer.train()
    return trainer


def test_a_run_draws_its_curves_at_the_end(tmp_path, log):
    train(tmp_path, "LOG.CURVES", True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"Curves: {tmp_path}/curves.png" in log.messages
    # The next run in the folder moves the picture away with the rest.
    train(tmp_path, "LOG.CURVES", False)
    assert not (tmp_path / "curves.png").exists()
    assert (tmp_path / "previous_001/curves.png").exists()


@pytest.mark.parametrize(("seconds", "in_ci", "drawn"), [(0, "", True), (0, "true", False), (60, "", False)])
def test_auto_is_for_longer_runs_that_are_not_in_ci(tmp_path, monkeypatch, log, seconds, in_ci, drawn):
    monkeypatch.setattr(report, "LEAST_SECONDS", seconds)
    monkeypatch.setenv("CI", in_ci)
    train(tmp_path)
    assert (tmp_path / "curves.png").exists() is drawn
    assert ("not drawn, since the environment variable CI is set" in "".join(log.messages)) is bool(in_ci)


def test_a_picture_that_cannot_be_drawn_never_fails_the_run(tmp_path, monkeypatch, log):
    train(tmp_path / "a", "LOG.CURVES", True, "LOG.WRITERS", [])
    log_text = "".join(log.messages)
    assert f"LOG.CURVES: curves.png is not drawn: {tmp_path}/a: " in log_text
    assert "no metrics.json" in log_text
    (tmp_path / "b").mkdir()
    (tmp_path / "b/curves.png").write_text("mine")
    train(tmp_path / "b", "LOG.CURVES", True)
    assert (tmp_path / "b/curves.png.old").read_text() == "mine"
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    train(tmp_path / "c", "LOG.CURVES", True)
    assert "LOG.CURVES: curves.png is not drawn: an image needs matplotlib" in "".join(log.messages)


def test_a_trial_run_draws_nothing(tmp_path):
    train(tmp_path, "LOG.CURVES", True, "FAST_DEV_RUN", 1)
    assert not (tmp_path / "curves.png").exists()
