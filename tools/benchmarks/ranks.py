"""A step on two ranks of one thread each, over a loop by hand with torch's wrapper and a DistributedSampler."""

from collections.abc import Callable
from functools import partial
from typing import Any

from measure import Groups, Run
from tasks import by_hand, default, digits_config, lean, plain_parts
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
MODELS: dict[str, tuple[int, list[Any]]] = {
    "MLP": (200, ["MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 64, "num_classes": 10, "hidden": [256, 256]}]),
    "ConvNet": (40, []),
}
WRAPPERS: dict[str, Callable[..., Any]] = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}


def _runs(folder: str, strategy: str, options: list[Any]) -> dict[str, Run]:
    cfg = digits_config(folder)
    cfg.merge_from_list(["PARALLEL.NAME", strategy, "MODEL.CHANNELS_LAST", False, *options])
    return {"by hand": by_hand(plain_parts(cfg, WRAPPERS[strategy])), "lean": lean(cfg), "default": default(cfg)}


GROUPS: Groups = {
    f"{strategy}, {model}": (steps, partial(_runs, strategy=strategy, options=options))
    for strategy in WRAPPERS
    for model, (steps, options) in MODELS.items()
}
