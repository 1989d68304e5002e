import pytest
from small_runs import mlp_config


@pytest.fixture
def make(tmp_path):
    given = ("MODEL.DEVICE", "cpu", "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"])
    return lambda *overrides: mlp_config(tmp_path / "run", *given, *overrides)


@pytest.fixture
def quick(make):
    return lambda *overrides: make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8, "SEED", 3, *overrides)
