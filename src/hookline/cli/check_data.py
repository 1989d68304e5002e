"""Check data sets: read every sample, and make one batch of each."""

import traceback
from collections.abc import Iterable
from typing import Any

from torch.utils.data import IterableDataset

from hookline.config import CfgNode, ConfigError, name_of
from hookline.engine.data import SeededLoader, build_test_loader, build_train_loader
from hookline.engine.data.batches import trivial_batch_collator
from hookline.engine.data.datasets import get_dataset
from hookline.engine.data.stream import StreamLoader


def check_all(cfg: CfgNode, most: int) -> int:
    """Check all data sets of a config, list up to ``most`` errors of each, and return the exit code."""
    if not cfg.DATASETS.TRAIN and not cfg.DATASETS.TEST:
        raise ConfigError("DATASETS: no data set is named; give a --config-file that names some")
    failed = 0
    for key in ("TRAIN", "TEST"):
        for i, entry in enumerate(cfg.DATASETS[key]):
            dataset: Any = get_dataset(entry, f"DATASETS.{key}[{i}]")
            if isinstance(dataset, IterableDataset):
                samples: Iterable[object] = StreamLoader(dataset, 1, seed=0, collate_fn=trivial_batch_collator)
            else:
                samples = SeededLoader(
                    dataset, seed=0, num_workers=cfg.DATALOADER.NUM_WORKERS, collate_fn=trivial_batch_collator
                )
            failed += _show_errors(f"DATASETS.{key}[{i}] ({name_of(entry)})", samples, most)
    if not failed:
        loaders = {"DATASETS.TRAIN": build_train_loader(cfg)} if cfg.DATASETS.TRAIN else {}
        loaders |= {name: build_test_loader(cfg, name) for name in map(name_of, cfg.DATASETS.TEST)}
        for name, loader in loaders.items():
            failed += _show_errors(f"a batch of {name}", (next(iter(one)) for one in [loader]), 1)
    return int(failed > 0)


def _show_errors(title: str, samples: Iterable[object], most: int) -> bool:
    """Print up to ``most`` errors of reading samples, and return whether there are any."""
    batches, found, end = iter(samples), 0, object()
    while found <= most:
        try:
            if next(batches, end) is end:
                break
        except Exception as error:
            found += 1
            lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
            frames = [i for i, line in enumerate(lines) if line.startswith("  ")]  # of an error in a worker
            text = "\n  ".join(lines[frames[-1] + 1 :] if frames else lines)
            print(f"{title}: {text if found <= most else f'there are more (--max {most})'}")
    if not found:
        print(f"{title}: can be read")
    return found > 0
