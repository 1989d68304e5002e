"""What ``--dry-run`` prints of a run's cost, also for models that are too large for this machine."""

import argparse
import os
from contextlib import suppress

import torch
from torch import nn

from ...config import CfgNode, Duration
from ...hooks.common.rng import preserve_rng
from ...hooks.watching.flops import known_peak
from ..defaults import DefaultTrainer
from ..modeling import resolve_device
from ..modeling.build import MODEL_SLOT
from ..parallel.base import STRATEGY_SLOT, Strategy
from ..parallel.fsdp import FSDP2
from ..parallel.mesh import Mesh
from ..ranks.torchrun import launched_by_torchrun
from ..setup.check import overridden_builders
from ..setup.find_batch_size import available_memory
from ..solver import build_optimizer
from ..solver.parts import solver_parts
from .estimate import (
    Layout,
    Memory,
    Transformer,
    activation_bytes,
    flops_per_token,
    memory_per_rank,
    multiplied_parameters,
    tokens_per_second,
)

__all__ = ["describe_cost", "estimate_run"]

_MFU = 0.4
_H100 = 989e12  # dense bfloat16 operations per second, from NVIDIA's data sheet


def estimate_run(trainer: type[DefaultTrainer], cfg: CfgNode, args: argparse.Namespace) -> tuple[str, str]:
    """Return the cost of a run before anything is built, and why this machine cannot build it (empty if it can).

    The model is built on torch's meta device, which takes no memory. For one that cannot be, both are empty.

    Args:
        trainer: the class that would train.
        cfg: a config that :func:`~hookline.engine.setup.check.check_config` accepts.
        args: the parsed command line.

    Raises:
        ConfigError: the model cannot be split as ``PARALLEL`` asks.
    """
    if launched_by_torchrun() or "build_model" in overridden_builders(trainer, DefaultTrainer):
        return "", ""
    try:
        with preserve_rng(), torch.device("meta"):
            model = MODEL_SLOT.build(cfg)
    except Exception:
        return "", ""
    ranks = args.num_gpus * args.num_machines
    strategy: Strategy = STRATEGY_SLOT.build(cfg)
    if isinstance(strategy, Mesh) and ranks > 1:
        strategy.check_model(model, ranks)
    return describe_cost(cfg, model, ranks, args), _obstacle(cfg, model, args)


def _obstacle(cfg: CfgNode, model: nn.Module, args: argparse.Namespace) -> str:
    """Return why this machine cannot build its ranks of a run; empty if it can."""
    if args.num_machines > 1:
        return f"it needs {args.num_machines} machines"
    gpus = resolve_device(cfg.MODEL.DEVICE).type == "cuda"
    devices = torch.cuda.device_count() if gpus else max(os.cpu_count() or 1, 8)
    if args.num_gpus > devices:
        return f"{args.num_gpus} ranks are too many for this machine ({devices} {'GPUs' if gpus else 'on its CPU'})"
    strategy: Strategy = STRATEGY_SLOT.build(cfg)
    copies = strategy.sizes(args.num_gpus)[0] if strategy.shards_weights else args.num_gpus
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    with suppress(OSError):  # known on Linux only
        if weights * copies > (free := available_memory()):
            return f"the weights need {_size(weights * copies)}, and this machine has {_size(free)} of free memory"
    if gpus and args.num_gpus == 1 and weights > (total := torch.cuda.get_device_properties(0).total_memory):
        return f"the weights need {_size(weights)}, and the GPU has {_size(total)}"
    return ""


def describe_cost(cfg: CfgNode, model: nn.Module, ranks: int, args: argparse.Namespace) -> str:
    """Return parameters, memory per rank and, for transformers, FLOPs and speed, as lines of text.

    Args:
        cfg: the config of the run.
        model: its model, on any device.
        ranks: number of processes.
        args: the parsed command line; ``mfu`` and ``peak_flops`` are used.
    """
    strategy: Strategy = STRATEGY_SLOT.build(cfg)
    layout = Layout(*strategy.sizes(ranks))
    cfg = DefaultTrainer.auto_scale_workers(cfg, layout.data_size)
    total = sum(p.numel() for p in model.parameters())
    shape = Transformer.of(model)
    samples = -(-cfg.DATALOADER.BATCH_SIZE // (layout.data_size * cfg.SOLVER.ACCUMULATION_STEPS))
    how = ", ".join(f"{name} {size}" for name, size in vars(layout).items())
    lines = [f"Estimate for {ranks} rank{'s' if ranks > 1 else ''} ({how}):", f"  parameters: {total:,}"]
    if shape is not None:
        flops = flops_per_token(multiplied_parameters(model), shape.depth, shape.width, shape.block_size)
        lines.append(f"  FLOPs per token: {flops / 1e9:.3g} G (6 N + 12 L w T, with T = {shape.block_size:,})")
    memory = _memory(cfg, model, layout, strategy, shape, samples)
    parts = [f"{name} {_size(value)}" for name, value in vars(memory).items() if value]
    if memory.activations is None:
        parts.append("activations not known")
    lines.append(f"  memory per rank: {_size(memory.total)} ({', '.join(parts)})")
    if shape is not None:
        peak = args.peak_flops or known_peak(resolve_device(cfg.MODEL.DEVICE)) or _H100
        mfu = args.mfu or _MFU
        speed = tokens_per_second(flops, ranks, peak, mfu)
        tokens = cfg.DATALOADER.BATCH_SIZE * shape.block_size
        lines += [
            f"  speed at {mfu:.0%} of {peak / 1e12:,.0f} TFLOP/s: {speed:,.0f} tokens/s, {speed / ranks:,.0f} per rank",
            f"  step: {tokens:,} tokens, {tokens / speed:.3g} s{_length(cfg, tokens / speed)}",
        ]
    if layout.data_size > cfg.DATALOADER.BATCH_SIZE:
        lines.append(
            f"  DATALOADER.BATCH_SIZE {cfg.DATALOADER.BATCH_SIZE} is less than a sample for each of {layout.data_size} "
            "shares of a batch: training refuses it"
        )
    return "\n".join(lines)


def _memory(
    cfg: CfgNode, model: nn.Module, layout: Layout, strategy: Strategy, shape: Transformer | None, samples: int
) -> Memory:
    """Return the memory of one rank, with ``samples`` in its micro-batch."""
    amp = cfg.SOLVER.AMP.ENABLED
    options = strategy.gathered(model) if isinstance(strategy, FSDP2) and layout.ranks > 1 else {}
    activations = None
    if shape is not None:
        checkpointed = bool(cfg.MODEL.ACTIVATION_CHECKPOINTING)
        number = 2 if amp else options.get("compute", 4)
        tokens = samples * shape.block_size
        activations = activation_bytes(shape, tokens, number=number, tensor=layout.tensor, checkpointed=checkpointed)
    return memory_per_rank(
        sum(p.numel() for p in model.parameters()),
        layout,
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        state=_state_per_parameter(cfg),
        autocast=amp,
        activations=activations,
        accumulates=cfg.SOLVER.ACCUMULATION_STEPS > 1,
        **options,
    )


def _state_per_parameter(cfg: CfgNode) -> float:
    """Return how many numbers per parameter the optimizer keeps, counted after a step of a small layer."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SOLVER.PARAM_GROUPS, cfg.SOLVER.LAYER_DECAY.LAYERS, cfg.SOLVER.LAYER_DECAY.FACTOR = [], [], 1.0
    parts = list(solver_parts(cfg).values()) if cfg.SOLVER.OPTIMIZERS else [cfg]
    most = 0.0
    for part in parts:
        layer = nn.Linear(64, 64, bias=False)
        layer.weight.grad = torch.zeros_like(layer.weight)
        with suppress(Exception):  # an optimizer of the user's, which needs more than a layer
            optimizer = build_optimizer(part, layer)
            optimizer.step()
            values = [v for v in optimizer.state[layer.weight].values() if isinstance(v, torch.Tensor) and v.dim()]
            most = max(most, sum(v.numel() * v.element_size() for v in values) / (4 * layer.weight.numel()))
    return most


def _length(cfg: CfgNode, seconds: float) -> str:
    """Return the time of all steps, if their number is known."""
    length = Duration.parse(cfg.SOLVER.MAX_ITER)
    if length.unit != "it":
        return ""
    hours = length.iterations() * seconds / 3600
    time = f"{hours / 24:.3g} days" if hours > 48 else f"{hours:.3g} hours"
    return f"; {length.iterations():,} steps take {time}"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
