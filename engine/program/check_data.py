"""Check data sets: read every sample, and make one batch of each."""

from itertools import islice
from typing import Any

from ...config import CfgNode, component, name_of
from ..data import build_test_loader, build_train_loader, check_data, check_samples, get_dataset

__all__ = ["check_all"]


def _check_set(title: str, dataset: Any, num_workers: int, most: int) -> int:
    """Print the samples of one data set that fail, up to ``most``, and return their number."""
    failures = list(islice(check_samples(dataset, num_workers), most + 1))
    for index, error in failures[:most]:
        print(f"{title}: sample {index}: {error}")
    if len(failures) > most:
        print(f"{title}: there are more (--max {most})")
    if not failures:
        number = f"{len(dataset)} " if hasattr(dataset, "__len__") else ""
        print(f"{title}: all {number}samples can be read")
    return len(failures)


def _check_batch(title: str, loader: Any) -> int:
    """Make one batch. Print an error, and return 1 then."""
    try:
        next(iter(loader))
    except Exception as error:
        print(f"{title}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n  ")
        return 1
    return 0


def check_all(cfg: CfgNode, most: int) -> int:
    """Check all data sets of a config, and return the exit code."""
    check_data(cfg)
    failures = 0
    for key in ("TRAIN", "TEST"):
        for i, entry in enumerate(cfg.DATASETS[key]):
            title = f"DATASETS.{key}[{i}] ({name_of(entry)})"
            dataset = get_dataset(
                {"NAME": component(entry)[0], "ARGS": component(entry)[1]}, f"DATASETS.{key}[{i}].ARGS"
            )
            failures += _check_set(title, dataset, cfg.DATALOADER.NUM_WORKERS, most)
    if failures:
        return 1
    if cfg.DATASETS.TRAIN:
        failures += _check_batch("a batch of DATASETS.TRAIN", build_train_loader(cfg))
    for name in map(name_of, cfg.DATASETS.TEST):
        failures += _check_batch(f"a batch of {name}", build_test_loader(cfg, name))
    return int(failures > 0)
