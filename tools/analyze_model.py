#!/usr/bin/env python
"""Show the parameters, FLOPs and activations of a config's model, submodule by submodule.

    python tools/analyze_model.py --config-file configs/digits/convnet.yaml
    python tools/analyze_model.py --config-file configs/digits/convnet.yaml --tasks parameter structure --depth 5

Runs the model on one test batch, in eval mode. fvcore counts, and a multiply-add is one operation. Nothing is written.
"""

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis, flop_count_table, parameter_count_table
from torch import nn

from hookline.command_line import ArgumentParser
from hookline.config import CfgNode, name_of
from hookline.engine import DefaultTrainer, config_errors_exit
from hookline.engine.data.batches import move_to_device
from hookline.engine.modeling import resolve_device
from hookline.engine.options import set_up_probe
from hookline.hooks.common.tensors import samples_in


class Prediction(nn.Module):
    """Predicts for one batch, whatever its form. Modules without inputs can be traced."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.model = DefaultTrainer.build_model(cfg)
        self._adapter = DefaultTrainer.build_adapter(cfg)
        sets = [name_of(entry) for entry in cfg.DATASETS.TEST]
        loader = DefaultTrainer.build_test_loader(cfg, sets[0]) if sets else DefaultTrainer.build_train_loader(cfg)
        self.batch = move_to_device(next(iter(loader)), resolve_device(cfg.MODEL.DEVICE))

    def forward(self) -> Any:
        outputs = self._adapter.predict(self.model, self.batch)
        return tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = ("parameter", "flop", "structure")
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML file of the run, or an example's name")
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=["flop"], help="flop: FLOPs and activations, too")
    parser.add_argument("--depth", type=int, default=3, help="depth of submodules (default: %(default)s)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values, as pairs")
    args = parser.parse_args()
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    with config_errors_exit(), torch.no_grad():
        analyzed = Prediction(set_up_probe(args)).eval()
        if "structure" in args.tasks:
            print(analyzed.model)
        if "parameter" in args.tasks:
            print(parameter_count_table(analyzed.model, max_depth=args.depth))
        if "flop" in args.tasks:
            flops, activations = FlopCountAnalysis(analyzed, ()), ActivationCountAnalysis(analyzed, ())
            print(flop_count_table(flops.unsupported_ops_warnings(False), args.depth + 1, activations=activations))
            print(f"{flops.total():,} FLOPs for {samples_in(analyzed.batch)} samples; a multiply-add counts as one")


if __name__ == "__main__":
    main()
