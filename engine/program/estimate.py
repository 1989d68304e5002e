"""What training a model costs, computed before it starts: FLOPs, memory per rank, tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

__all__ = [
    "Layout",
    "Memory",
    "Transformer",
    "activation_bytes",
    "flops_per_token",
    "memory_per_rank",
    "multiplied_parameters",
    "tokens_per_second",
]


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder-only transformer. The fields are the attributes of :class:`~hookline.engine.modeling.GPT`.

    Attributes:
        width: embedding size.
        depth: number of blocks.
        heads: attention heads per block.
        kv_heads: heads of keys and values.
        mlp_width: hidden size of the MLP.
        gated: whether the MLP has a third layer, as SwiGLU.
        vocab_size: number of different tokens.
        block_size: tokens of a text.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int
    mlp_width: int
    gated: bool
    vocab_size: int
    block_size: int

    @classmethod
    def of(cls, model: Any) -> "Transformer | None":
        """Return the shape of a model that has all these attributes; None for any other."""
        names = [field.name for field in fields(cls)]
        if not all(isinstance(getattr(model, name, None), int) for name in names):
            return None
        return cls(**{name: getattr(model, name) for name in names})


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: copies of the model, shards of a copy, parts of each layer.

    Attributes:
        replicate: groups of ranks that each hold the whole model (DDP).
        shard: ranks that a copy's weights, gradients and optimizer state are sharded over (FSDP2).
        tensor: ranks that split each layer and share a batch (tensor parallelism).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.replicate * self.shard * self.tensor

    @property
    def data_size(self) -> int:
        """The number of shares of a global batch."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the peak of a step.

    Attributes:
        weights: the rank's part of the parameters.
        gradients: of that part.
        optimizer: the optimizer's state for that part.
        gathered: whole units that sharding gathers for computing, and their gradients; or copies in lower precision
            that autocast makes.
        activations: what the backward pass needs; None: not known.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float | None

    @property
    def total(self) -> float:
        """The sum of what is known."""
        return self.weights + self.gradients + self.optimizer + self.gathered + (self.activations or 0.0)


def multiplied_parameters(model: nn.Module) -> int:
    """Return the number of parameters that each token is multiplied with: all but embeddings, which are looked up.

    An embedding that another layer shares counts. The model may be on the meta device.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    others = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    used = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return sum(p.numel() for p in model.parameters() if id(p) in used or id(p) not in looked_up)


def flops_per_token(parameters: int, depth: int, width: int, length: int) -> float:
    """Return the operations of a forward and backward pass per token: ``6 N + 12 L w T``.

    Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B; Kaplan et al., arXiv:2001.08361, section 2.1, for the first
    term. Attention counts in full, although half of it is masked; recomputed activations do not count.

    Args:
        parameters: N, see :func:`multiplied_parameters`.
        depth: L, the number of blocks.
        width: w, the size of all heads together.
        length: T, the number of tokens that a token may attend to.
    """
    return 6.0 * parameters + 12.0 * depth * width * length


def activation_bytes(
    shape: Transformer, tokens: int, *, number: int = 2, tensor: int = 1, checkpointed: bool = False
) -> float:
    """Return roughly what a forward pass of a transformer keeps for its backward pass.

    Counted as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv:2205.05198, with an attention that keeps no scores (FlashAttention) and without dropout. The scores of the
    vocabulary, and their gradients, are in float32 as well.

    Args:
        shape: of the model.
        tokens: on this rank in a micro-batch.
        number: bytes of an activation: 2 for bfloat16.
        tensor: ranks that split each layer.
        checkpointed: whether blocks recompute their activations (``MODEL.ACTIVATION_CHECKPOINTING``).
    """
    keys = shape.width // shape.heads * shape.kv_heads
    whole = 4 * shape.width  # inputs and outputs of two norms
    split = 2 * shape.width + 2 * keys + (4 if shape.gated else 2) * shape.mlp_width  # queries, attended, keys, values
    block = whole + split / tensor
    blocks = shape.depth * shape.width + block if checkpointed else shape.depth * block
    return tokens * (number * (blocks + 2 * shape.width) + (2 * 4 + number) * shape.vocab_size)


def memory_per_rank(
    parameters: int,
    layout: Layout,
    *,
    trainable: int | None = None,
    state: float = 2.0,
    number: int = 4,
    compute: int = 4,
    reduce: int | None = None,
    autocast: bool = False,
    units: Sequence[int] = (),
    resharded: bool = True,
    accumulates: bool = False,
    activations: float | None = None,
) -> Memory:
    """Return the memory of one rank.

    Args:
        parameters: of the whole model.
        layout: how ranks share it. Every layer is taken as split by ``tensor``.
        trainable: parameters with gradients. None: all.
        state: numbers of the optimizer's state per trainable parameter: 2 for Adam.
        number: bytes of a parameter, a gradient or a number of the state.
        compute: bytes of a parameter while a unit is gathered.
        reduce: bytes of a whole unit's gradient. None: ``compute``.
        autocast: autocast keeps copies of all weights in two bytes until the backward pass has used them.
        units: parameters in each unit of a sharded model; the last one is the rest of the model, which stays gathered
            during a pass. Others are gathered in turn, the next one while one is computed.
        resharded: units are freed after the forward pass.
        accumulates: there are several micro-batches, whose sharded gradients are whole until the last one.
        activations: bytes; see :func:`activation_bytes`.
    """
    parts = layout.shard * layout.tensor
    trainable = parameters if trainable is None else trainable
    gathered = 2.0 * parameters / layout.tensor if autocast else 0.0
    if layout.shard > 1:
        *inner, rest = units or (parameters,)
        largest = max(inner, default=0)
        gradient = compute if reduce is None else reduce
        whole = rest + 2 * largest if resharded else parameters
        gradients = trainable if accumulates else rest + largest
        gathered += (whole * compute + gradients * gradient) / layout.tensor
    return Memory(
        weights=number * parameters / parts,
        gradients=number * trainable / parts,
        optimizer=number * state * trainable / parts,
        gathered=gathered,
        activations=activations,
    )


def tokens_per_second(flops: float, ranks: int, peak: float, mfu: float) -> float:
    """Return the tokens per second of all ranks.

    Args:
        flops: per token; see :func:`flops_per_token`.
        ranks: number of devices.
        peak: operations per second that a device's data sheet promises.
        mfu: share of the peak that training reaches (model FLOPs utilization): 0.3 to 0.5 is usual.
    """
    return ranks * peak * mfu / flops
