"""Check data sets: read every sample, and make one batch of each."""

import traceback
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ...config import CfgNode, name_of
from ..data import SeededLoader, StreamLoader, build_test_loader, build_train_loader, check_data, get_dataset
from ..data.loader import identity


def check_all(cfg: CfgNode, most: int) -> int:
    """Check all data sets of a config, list up to ``most`` errors of each, and return the exit code."""
    check_data(cfg)
    parts: list[tuple[str, Iterable[Any]]] = []
    for key in ("TRAIN", "TEST"):
        for i, entry in enumerate(cfg.DATASETS[key]):
            dataset: Any = get_dataset(entry, f"DATASETS.{key}[{i}].ARGS")
            if isinstance(dataset, IterableDataset):
                samples: Any = StreamLoader(dataset, 1, seed=0, collate_fn=identity)
            else:
                samples = SeededLoader(dataset, seed=None, num_workers=cfg.DATALOADER.NUM_WORKERS, collate_fn=identity)
            parts.append((f"DATASETS.{key}[{i}] ({name_of(entry)})", samples))
    failed = [title for title, samples in parts if _show_errors(title, samples, most)]
    if not failed:
        parts = [("a batch of DATASETS.TRAIN", build_train_loader(cfg))] if cfg.DATASETS.TRAIN else []
        parts += [(f"a batch of {name}", build_test_loader(cfg, name)) for name in map(name_of, cfg.DATASETS.TEST)]
        failed = [title for title, loader in parts if _show_errors(title, _first(loader), 1)]
    return int(bool(failed))


def _first(loader: Any) -> Iterator[Any]:
    yield next(iter(loader), None)


def _show_errors(title: str, batches: Iterable[Any], most: int) -> bool:
    """Print the errors of reading batches, up to ``most``, and return whether there are any."""
    errors = list(islice(_errors(iter(batches)), most + 1))
    for error in errors[:most]:
        print(f"{title}: {error}")
    if len(errors) > most:
        print(f"{title}: there are more (--max {most})")
    if not errors:
        print(f"{title}: can be read")
    return bool(errors)


def _errors(batches: Iterator[Any]) -> Iterator[str]:
    while True:
        try:
            next(batches)
        except StopIteration:
            return
        except Exception as error:
            lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
            frames = [i for i, line in enumerate(lines) if line.startswith("  ")]  # of an error in a worker
            yield "\n  ".join(lines[frames[-1] + 1 :] if frames else lines)
