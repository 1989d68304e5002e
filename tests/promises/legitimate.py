"""The usual script, and a check that a run trained and left the files of the person alone."""

import json
from pathlib import Path

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, default_setup

CONFIG = """
MODEL: {NAME: MLP, ARGS: {in_features: 8, num_classes: 4}, LOSS: {NAME: CrossEntropyLoss}, DEVICE: cpu}
DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {size: 32}}]}
DATALOADER: {BATCH_SIZE: 8}
SOLVER: {MAX_ITER: 4, WARMUP_ITERS: 0, STEPS: []}
LOG: {PERIOD: 2}
OUTPUT_DIR: out
"""
MINE: dict[Path, bytes] = {}


def mine(path, content="mine"):
    """Write a file of the person, which must be unharmed at the end."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return keep(path)


def keep(path):
    """Make an existing file one that must be unharmed at the end."""
    MINE[Path(path).absolute()] = Path(path).read_bytes()
    return path


class Trainer(DefaultTrainer):
    """The subclass that most scripts have."""


def train(cfg, resume=False):
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=resume)
    return trainer.train()


def merged(args, cfg=None):
    cfg = cfg or get_cfg()
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    return cfg


def set_up(args):
    cfg = merged(args)
    cfg.freeze()
    default_setup(cfg, args)
    return cfg


def usual(args):
    """The script that everybody writes."""
    cfg = set_up(args)
    return train(cfg, args.resume)


def set_up_and_train(cfg, args):
    """The end of most scripts."""
    default_setup(cfg, args)
    check(train(cfg, args.resume))


def check(result):
    """Check that a run trained four steps, wrote its files, and harmed none of the person's.

    A file of the person is where it was, in ``previous_*`` if it has the name of a run's file, or a log's beginning.
    """
    assert (result.iteration, result.reason) == (4, "completed")
    (metrics,) = (path for path in Path().rglob("metrics.json") if "previous_" not in str(path))
    assert json.loads(metrics.read_text().splitlines()[-1])["iteration"] in (3, 4)  # 4: the evaluation at the end
    assert (metrics.parent / "model_final.pth").exists()
    saved = get_cfg()
    saved.set_new_allowed(True)
    saved.merge_from_file(metrics.parent / "config.yaml")
    assert saved.SOLVER.MAX_ITER == 4
    for path, content in MINE.items():
        places = [place for place in (path, *path.parent.glob(f"previous_*/{path.name}")) if place.exists()]
        assert any(place.read_bytes() == content for place in places) or (
            path.name == "log.txt" and path.read_bytes().startswith(content)
        ), path
