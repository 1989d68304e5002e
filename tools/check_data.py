#!/usr/bin/env python
"""Read every sample of a config's data sets, and make one batch of each. Lists the samples that fail.

    python tools/check_data.py --config-file configs/digits/mlp.yaml
    python tools/check_data.py --config-file configs/digits/mlp.yaml DATALOADER.NUM_WORKERS 8

The exit code is 1 if there are any.
"""

import argparse
from itertools import islice
from typing import Any

from hookline.config import CfgNode, component, get_cfg, name_of
from hookline.engine import config_errors_exit
from hookline.engine.data import (
    build_test_loader,
    build_train_loader,
    check_data,
    check_samples,
    get_dataset,
)


def check_set(title: str, dataset: Any, num_workers: int, most: int) -> int:
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


def check_batch(title: str, loader: Any) -> int:
    """Make one batch. Print an error, and return 1 then."""
    try:
        next(iter(loader))
    except Exception as error:
        print(f"{title}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n  ")
        return 1
    return 0


def main(cfg: CfgNode, most: int) -> int:
    """Check all data sets of a config, and return the exit code."""
    check_data(cfg)
    failures = 0
    for key in ("TRAIN", "TEST"):
        for i, entry in enumerate(cfg.DATASETS[key]):
            title = f"DATASETS.{key}[{i}] ({name_of(entry)})"
            dataset = get_dataset(
                {"NAME": component(entry)[0], "ARGS": component(entry)[1]}, f"DATASETS.{key}[{i}].ARGS"
            )
            failures += check_set(title, dataset, cfg.DATALOADER.NUM_WORKERS, most)
    if failures:
        return 1
    if cfg.DATASETS.TRAIN:
        failures += check_batch("a batch of DATASETS.TRAIN", build_train_loader(cfg))
    for name in map(name_of, cfg.DATASETS.TEST):
        failures += check_batch(f"a batch of {name}", build_test_loader(cfg, name))
    return int(failures > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--max", type=int, default=20, help="failing samples of a set to list")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    args = parser.parse_intermixed_args()
    with config_errors_exit():
        cfg = get_cfg()
        if args.config_file:
            cfg.merge_from_file(args.config_file)
        cfg.merge_from_list(args.opts)
        raise SystemExit(main(cfg, args.max))
