"""A trial of the evaluation on a few batches, before training."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from ...config import CfgNode, name_of
from ...hooks.common.rng import preserve_rng
from .evaluator import evaluation_context

__all__ = ["sanity_check_batches", "trial"]


@contextmanager
def trial(cfg: CfgNode, max_batches: int, gpus: Iterable[int] = ()) -> Iterator[CfgNode]:
    """Make evaluations within the block short and without effects on the run.

    Every :func:`inference_on_dataset` runs at most ``max_batches``, and emits no events. The global random generators
    are restored at the end.

    Args:
        cfg: the full config.
        max_batches: batches of each data set.
        gpus: GPUs whose generators are restored too.

    Returns:
        A config whose loaders read only so many batches, in at most one worker.
    """
    cfg = cfg.clone()
    cfg.defrost()
    settings = cfg.DATALOADER
    settings.LIMIT_TEST_BATCHES = min(settings.LIMIT_TEST_BATCHES or max_batches, max_batches)
    settings.NUM_WORKERS = min(settings.NUM_WORKERS, 1)
    cfg.freeze()
    with preserve_rng(gpus), evaluation_context(_no_events, max_batches):
        yield cfg


def sanity_check_batches(cfg: CfgNode, overridden: Collection[str]) -> int:
    """Number of test batches to try before training; 0 for none.

    Args:
        cfg: the full config.
        overridden: methods that a subclass of DefaultTrainer overrides. Nothing is known of the cost of its own
            ``test``, so that is not called before training.
    """
    if not cfg.DATASETS.TEST or "test" in overridden or "SanityCheck" in map(name_of, cfg.HOOKS):
        return 0
    return int(cfg.TEST.SANITY_CHECK_BATCHES)


def _no_events(*args: object) -> None:
    pass
