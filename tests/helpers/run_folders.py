"""Folders of runs, written by hand."""

import json


def make_run(folder, rows=None, config=None):
    """Write the folder of a run of four rows of metrics, with an evaluation after the first 20 and all iterations."""
    if rows is None:
        rows = [
            {"iteration": 9, "loss": 1.5, "total_loss": 1.5, "lr": 0.1, "time": 0.5, "eta_seconds": 9.0},
            {"iteration": 19, "loss": 0.9, "total_loss": 0.9, "lr": 0.1, "time": 0.5, "test/accuracy": 0.5},
            {"iteration": 29, "loss": None, "total_loss": None, "lr": 0.01, "time": 1.0, "eta_seconds": 9.0},
            {"iteration": 40, "test/accuracy": 0.75, "test/loss": 0.8},
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return str(folder)
