"""Check data sets: read every sample, and make one batch of each."""

import traceback
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ...config import CfgNode, name_of
from ..data import StreamLoader, build_test_loader, build_train_loader, check_data, get_dataset
from ..data.reading import BatchLoader, identity

__all__ = ["check_all"]


def check_all(cfg: CfgNode, most: int) -> int:
    """Check all data sets of a config, and return the exit code."""
    check_data(cfg)
    failures = 0
    for key in ("TRAIN", "TEST"):
        for i, entry in enumerate(cfg.DATASETS[key]):
            dataset: Any = get_dataset(entry, f"DATASETS.{key}[{i}].ARGS")
            if isinstance(dataset, IterableDataset):
                samples: Any = StreamLoader(dataset, 1, seed=0, collate_fn=identity)
            else:
                samples = BatchLoader(dataset, num_workers=cfg.DATALOADER.NUM_WORKERS, collate_fn=identity)
            failures += _show_errors(f"DATASETS.{key}[{i}] ({name_of(entry)})", samples, most)
    if failures:
        return 1
    if cfg.DATASETS.TRAIN:
        failures += _show_errors("a batch of DATASETS.TRAIN", _first(build_train_loader(cfg)), 1)
    for name in map(name_of, cfg.DATASETS.TEST):
        failures += _show_errors(f"a batch of {name}", _first(build_test_loader(cfg, name)), 1)
    return int(failures > 0)


def _first(loader: Any) -> Iterator[Any]:
    yield next(iter(loader), None)


def _show_errors(title: str, loader: Iterable[Any], most: int) -> int:
    """Print the errors of reading a loader, up to ``most``, and return their number."""
    errors = list(islice(_errors(loader), most + 1))
    for error in errors[:most]:
        print(f"{title}: {error}")
    if len(errors) > most:
        print(f"{title}: there are more (--max {most})")
    if not errors:
        print(f"{title}: can be read")
    return len(errors)


def _errors(loader: Iterable[Any]) -> Iterator[str]:
    batches = iter(loader)
    while True:
        try:
            next(batches)
        except StopIteration:
            return
        except Exception as error:
            lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
            frames = [i for i, line in enumerate(lines) if line.startswith("  ")]  # of an error in a worker
            yield "\n  ".join(lines[frames[-1] + 1 :] if frames else lines)
