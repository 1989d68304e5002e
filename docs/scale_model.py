"""The cost model of docs/scale.md: collectives, steps of several strategies, and when to save a checkpoint."""

import math
from dataclasses import dataclass
from functools import cache

import torch

from hookline.config import get_cfg
from hookline.engine.modeling import GPT
from hookline.engine.program.estimate import (
    Layout,
    Transformer,
    activation_bytes,
    flops_per_token,
    memory_per_rank,
    multiplied_parameters,
)

NODE = 8  # GPUs of a machine
DEVICE_MEMORY = 80e9
PEAK = 989e12  # H100 SXM, bfloat16, data sheet
REACHED = 0.8  # of a link's bandwidth, by large collectives: assumed
INSIDE, BETWEEN = 450e9 * REACHED, 50e9 * REACHED  # bytes/s per GPU and direction: NVLink 4, 400 Gb/s network
# Seconds: NCCL's own cost model (src/graph/tuning.cc of NVIDIA/nccl). A ring's start, its step inside of a machine and
# between machines; a tree's step.
START, STEP_INSIDE, STEP_BETWEEN, TREE_STEP = 8.4e-6, 3.4e-6, 14.0e-6, 28e-6
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces at once
WEIGHT, GRADIENT = 2, 4  # bytes, as they are sent: param_dtype bfloat16, reduce_dtype float32

# Published: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (as in arXiv:2410.06511): Llama 3.1
# 8B, FSDP2, 2 texts of 8,192 tokens per GPU, tokens per second and GPU.
TITAN = {"compiled": {8: 6667, 128: 6514}, "eager": {8: 5762, 128: 5605}}
TEXT = 8192
TITAN_TOKENS = 2 * TEXT


# ---------------------------------------------------------------------- collectives


def ring(size: float, ranks: int, per_node: int, passes: int) -> float:
    """Seconds of an all-gather or reduce-scatter (one pass), or an all-reduce (two), in a ring.

    Args:
        size: bytes of the whole tensor.
        ranks: in the group.
        per_node: ranks of the group on a machine. Each has its own network link.
        passes: 1 or 2.
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / per_node)
    bandwidth = INSIDE if nodes == 1 else min(INSIDE, per_node * BETWEEN)
    between = nodes if nodes > 1 else 0
    latency = passes * ((ranks - 1 - between) * STEP_INSIDE + between * STEP_BETWEEN)
    return START + max(latency, 0.0) + passes * size * (ranks - 1) / ranks / bandwidth


def all_reduce(size: float, ranks: int, per_node: int) -> float:
    """Seconds of an all-reduce: in a ring, or in a tree if that takes less."""
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / per_node)
    bandwidth = INSIDE if nodes == 1 else min(INSIDE, per_node * BETWEEN)
    steps = min(ranks, per_node) - 1 + math.log2(nodes)
    return min(ring(size, ranks, per_node, 2), 2 * steps * TREE_STEP + 2 * size / bandwidth)


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Model:
    """What the cost depends on.

    Attributes:
        shape: of the transformer.
        parameters: all.
        multiplied: without embeddings that are looked up.
        units: parameters of what FSDP2 gathers together; the last one is the rest.
    """

    shape: Transformer
    parameters: int
    multiplied: int
    units: tuple[int, ...]

    @property
    def flops(self) -> float:
        """Operations per token."""
        return flops_per_token(self.multiplied, self.shape.depth, self.shape.width, TEXT)


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    Attributes:
        compute: forward, backward and update.
        communication: all of it.
        exposed: the part of it during which nothing is computed.
        total: the step, with the loss by ranks that wait for each other.
    """

    compute: float
    communication: float
    exposed: float
    total: float


@cache
def build(name: str) -> Model:
    """Return what the model of a config costs. It is built without memory."""
    cfg = get_cfg()
    cfg.merge_from_file(f"language/{name}.yaml")
    with torch.device("meta"):
        model = GPT(**cfg.MODEL.ARGS)
    shape = Transformer.of(model)
    assert shape is not None
    count = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    ends = [p.numel() for p in (model.tokens.weight, model.head.weight)]
    units = [*blocks, *ends] if "head" in cfg.PARALLEL.ARGS.modules else blocks
    return Model(shape, count, multiplied_parameters(model), (*units, count - sum(units)))


def step(model: Model, layout: Layout, tokens: float, mfu: float, waiting: float) -> Step:
    """Return the time of a step.

    Args:
        model: the model.
        layout: how ranks share it. Ranks of ``tensor`` are on one machine, then those of ``shard``.
        tokens: per GPU.
        mfu: share of the peak that computing alone reaches.
        waiting: see :func:`waiting_of_titan`.
    """
    compute = tokens * model.flops / (PEAK * mfu)
    forward, backward = compute / 3, 2 * compute / 3
    if layout.shard > 1:
        communication, exposed = sharded(model, layout, forward, backward)
    else:
        communication, exposed = replicated(model, layout, backward)
    blocking = tensor_parallel(model, layout.tensor, tokens)
    total = (compute + exposed + blocking) * (1 + waiting * math.log2(max(layout.ranks / NODE, 1)))
    return Step(compute, communication + blocking, exposed + blocking, total)


def replicated(model: Model, layout: Layout, backward: float) -> tuple[float, float]:
    """Seconds of DDP's communication, and of what the backward pass does not hide: the last bucket at least."""
    if layout.replicate == 1:
        return 0.0, 0.0
    size = GRADIENT * model.parameters / layout.tensor
    buckets = max(round(size / BUCKET), 1)
    one = all_reduce(size / buckets, layout.replicate, max(NODE // layout.tensor, 1))
    return buckets * one, one + max(0.0, (buckets - 1) * (one - backward / buckets))


def sharded(model: Model, layout: Layout, forward: float, backward: float) -> tuple[float, float]:
    """The same for FSDP2 and HSDP. A unit is gathered while the one before is computed."""
    near = NODE // layout.tensor  # ranks of one machine with the same part of each layer
    per_node = min(near, layout.shard)
    copies = max(near // layout.shard, 1)
    communication = exposed = 0.0
    for number, unit in enumerate(model.units):
        size = unit / layout.tensor
        gather = ring(WEIGHT * size, layout.shard, per_node, 1)
        scatter = ring(GRADIENT * size, layout.shard, per_node, 1)
        reduce = all_reduce(GRADIENT * size / layout.shard, layout.replicate, copies)
        share = unit / sum(model.units)
        communication += 2 * gather + scatter + reduce
        first = number == 0
        # Gathering and scattering share the links of the shards; copies are reduced over the network.
        exposed += gather if first else max(0.0, gather - forward * share)
        exposed += scatter + reduce if first else max(0.0, max(gather + scatter, reduce) - backward * share)
    return communication, exposed


def tensor_parallel(model: Model, ranks: int, tokens: float) -> float:
    """Seconds of the all-reduces of activations, which nothing hides: two per block and pass."""
    size = 2.0 * tokens * ranks * model.shape.width  # the ranks share a batch
    return 4 * model.shape.depth * all_reduce(size, ranks, ranks)


def fits(model: Model, layout: Layout, tokens: float) -> bool:
    """Whether weights, gradients, optimizer and checkpointed activations fit into a GPU."""
    text = min(tokens * layout.tensor, TEXT)  # a micro-batch of one text
    activations = activation_bytes(model.shape, int(text), tensor=layout.tensor, checkpointed=True)
    memory = memory_per_rank(
        model.parameters, layout, compute=WEIGHT, reduce=GRADIENT, units=model.units, activations=activations
    )
    return memory.total <= DEVICE_MEMORY


# ---------------------------------------------------------------------- calibration


@cache
def calibrated(which: str = "compiled") -> tuple[float, float]:
    """Return the share of the peak that computing reaches, so that 8 GPUs are as fast as published, and the waiting.

    Waiting is the growth of a step with each doubling of the GPUs that communication does not explain: ranks that
    wait for the slowest. It makes 128 GPUs, compiled, as fast as published.
    """
    model = build("gpt_8b")
    published = TITAN[which]
    low, high = 0.2, 0.8
    for _ in range(50):
        mfu = (low + high) / 2
        seconds = step(model, Layout(shard=8), TITAN_TOKENS, mfu, 0.0).total
        low, high = (mfu, high) if TITAN_TOKENS / seconds < published[8] else (low, mfu)
    if which != "compiled":
        return mfu, calibrated()[1]
    without = step(model, Layout(shard=128), TITAN_TOKENS, mfu, 0.0).total
    return mfu, (TITAN_TOKENS / published[128] / without - 1) / math.log2(128 / NODE)


# ---------------------------------------------------------------------- checkpoints


def daly(delay: float, between: float) -> float:
    """The interval of Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 37."""
    if delay >= 2 * between:
        return between
    part = delay / (2 * between)
    return math.sqrt(2 * delay * between) * (1 + math.sqrt(part) / 3 + part / 9) - delay
