import pytest

from hookline.config import get_cfg

SOUND = [
    "MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "MODEL.DEVICE", "cpu",
    "MODEL.LOSS.NAME", "CrossEntropyLoss",
    "DATASETS.TRAIN", ["synthetic"], "DATASETS.TEST", ["synthetic"], "TEST.METRICS", ["Accuracy"],
]  # fmt: skip


@pytest.fixture
def make(tmp_path):
    def make(*overrides):
        cfg = get_cfg()
        cfg.merge_from_list([*SOUND, "OUTPUT_DIR", str(tmp_path / "run"), *overrides])
        return cfg

    return make


@pytest.fixture
def quick(make):
    def quick(*overrides):
        return make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8, "SEED", 3, *overrides)

    return quick
