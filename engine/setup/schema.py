"""All keys that name components, and the JSON schema of config files with them."""

import inspect
from typing import Any

from ...config import CfgNode, defaults, get_cfg
from ...config.schema.build import config_schema
from ...config.schema.comments import key_comments
from ...config.slots import Slot
from ..data.build import SAMPLER_SLOT
from ..data.collate import COLLATE_REGISTRY
from ..data.datasets import TEST_SLOT, TRAIN_SLOT
from ..evaluation.build import EVALUATOR_SLOT, METRICS_SLOT, TRAIN_METRICS_SLOT
from ..modeling.build import LOSS_SLOT, MODEL_SLOT
from ..parallel.base import STRATEGY_SLOT
from ..solver import param_rules, parts
from ..solver.build import OPTIMIZER_SLOT
from ..solver.scheduling import SCHEDULE_SLOT
from .check import HOOK_SLOT, WRITER_SLOT

__all__ = ["SLOTS", "schema_of_configs"]

SLOTS = (
    *(MODEL_SLOT, LOSS_SLOT, TRAIN_SLOT, TEST_SLOT, SAMPLER_SLOT, OPTIMIZER_SLOT, SCHEDULE_SLOT, EVALUATOR_SLOT),
    *(METRICS_SLOT, TRAIN_METRICS_SLOT, HOOK_SLOT, WRITER_SLOT, STRATEGY_SLOT),
    Slot(COLLATE_REGISTRY, "DATALOADER.COLLATE_FN.NAME"),
)


def schema_of_configs(cfg: CfgNode | None = None) -> dict[str, Any]:
    """Return the JSON schema of config files, with the names that are registered now.

    Args:
        cfg: the defaults, with keys of a project's own. Default: those of ``get_cfg()``.
    """
    cfg = get_cfg() if cfg is None else cfg
    comments = key_comments(inspect.getsource(defaults))
    return config_schema(cfg, SLOTS, comments, _extra(cfg))


def _extra(cfg: CfgNode) -> dict[str, Any]:
    rule: dict[str, Any] = {"type": "object", "properties": {key: {} for key in param_rules.KEYS}}
    part = {key: {"$ref": f"#/properties/SOLVER/properties/{key}"} for key in cfg.SOLVER if key not in parts.COMMON}
    one = {"type": "object", "properties": {**{key: {} for key in parts.OWN}, **part}, "additionalProperties": False}
    return {
        "SOLVER.PARAM_GROUPS": {"items": {**rule, "additionalProperties": False}},
        "SOLVER.OPTIMIZERS": {"additionalProperties": one},
        "SOLVER.OPTIMIZER": {"type": ["object", "string"]},
        "TEST.EVALUATOR": {"type": ["object", "string"]},
    }
