"""A step of SimpleTrainer without hooks, and of DefaultTrainer with its defaults, over the loop by hand."""

from functools import partial

from measure import Groups, Run
from tasks import by_hand, default, digits_config, lean, plain_parts, tiny_config


def _runs(folder: str, tiny: bool) -> dict[str, Run]:
    cfg = tiny_config(folder) if tiny else digits_config(folder)
    return {"by hand": by_hand(plain_parts(cfg)), "lean": lean(cfg), "default": default(cfg)}


def _compiled(folder: str) -> dict[str, Run]:
    cfg = tiny_config(folder)
    return {"by hand": by_hand(plain_parts(cfg)), "lean, COMPILE_STEP": lean(cfg, compile_step=True)}


GROUPS: Groups = {  # as many steps as between two checkpoints, so that each round saves one
    "tiny": (5000, partial(_runs, tiny=True)),
    "digits": (115, partial(_runs, tiny=False)),
    "compiled": (5000, _compiled),
}
