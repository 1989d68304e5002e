"""A step of SimpleTrainer without hooks, and of DefaultTrainer with its defaults, over the loop by hand."""

from functools import partial

import torch
from measure import Groups, Run
from tasks import by_hand, default, digits_config, lean, plain_parts, tiny_config


def _runs(folder: str, tiny: bool) -> dict[str, Run]:
    cfg = tiny_config(folder) if tiny else digits_config(folder)
    return {"by hand": by_hand(plain_parts(cfg)), "lean": lean(cfg), "default": default(cfg)}


def _gpu(folder: str) -> dict[str, Run]:
    """A ConvNet in bfloat16, default runs without checkpoints."""
    cfg = digits_config(folder)
    data = {"NAME": "synthetic", "ARGS": {"size": 4096, "shape": [3, 32, 32], "num_classes": 10}}
    cfg.merge_from_list(["MODEL.ARGS", {"width": 128, "in_channels": 3}, "DATASETS.TRAIN", (data,)])
    cfg.merge_from_list(["MODEL.DEVICE", "cuda", "SOLVER.AMP.ENABLED", True, "SOLVER.CHECKPOINT_PERIOD", 0])
    cfg.DATALOADER.BATCH_SIZE = 256
    runs = {"by hand": by_hand(plain_parts(cfg), "cuda"), "default": default(cfg)}
    compiled = cfg.clone()
    compiled.MODEL.COMPILE.ENABLED = True
    runs["MODEL.COMPILE"] = default(compiled)
    return runs


GROUPS: Groups = {  # as many steps as between two checkpoints, so that each round saves one
    "tiny": (5000, partial(_runs, tiny=True)),
    "digits": (115, partial(_runs, tiny=False)),
}
if torch.cuda.is_available():
    GROUPS["gpu"] = (100, _gpu)
