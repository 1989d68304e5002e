"""A decoder-only transformer for language models, in the shape of GPT-2."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .build import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class GPT(nn.Module):
    """Predicts the next token at each position of a text.

    The transformer of Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019): learned
    positions, pre-norm blocks, and output weights of residual branches scaled down with the depth.

    Args:
        vocab_size: number of different tokens; 256 for bytes.
        block_size: maximum number of tokens in a text.
        width: embedding size, a multiple of ``heads``.
        depth: number of blocks.
        heads: attention heads per block.
        dropout: probability after the embedding and at the end of each residual branch.
        kv_heads: heads of keys and values, each shared by ``heads / kv_heads`` heads of queries (grouped-query
            attention, arXiv:2305.13245). Queries, keys and values are then separate layers, which tensor parallelism
            can split. None: as many as ``heads``, in one layer.
        mlp_width: hidden size of the MLP. None: ``4 * width``.
        tie_weights: use the embedding's weights as those of the output layer.

    Shapes:
        tokens (N, T) int64, T <= block_size; output (N, vocab_size, T): scores for the token after each position, with
        the classes in the dimension where ``CrossEntropyLoss`` and ``Accuracy`` expect them.

    Raises:
        ValueError: sizes do not fit together, or the text is too long.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        kv_heads: int | None = None,
        mlp_width: int | None = None,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        for name, size, divisor, value in (
            ("width", width, "heads", heads),
            ("heads", heads, "kv_heads", heads if kv_heads is None else kv_heads),
        ):
            if value < 1 or size % value:
                raise ValueError(f"{name} must be a multiple of {divisor}, {value}, not {size}")
        self.block_size, self.separate = block_size, kv_heads is not None
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout, kv_heads, mlp_width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                layer: Any = self.get_submodule(name.removesuffix(".weight"))
                std = 0.02 / (2 * depth) ** 0.5 if name.endswith("proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)
                layer.reset_parameters = partial(_reset, layer, std)  # for PARALLEL.ARGS.init: "meta"

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """How tensor parallelism splits the layers, by patterns of their names.

        Attention is split by heads if ``kv_heads`` is given; a fused layer of queries, keys and values is not. The
        embedding and the output layer are split by tokens of the vocabulary.
        """
        plan = {"tokens": "rowwise", "head": "colwise->replicate"}  # both split the vocabulary, so they can be tied
        plan |= {"blocks.*.mlp": "colwise", "blocks.*.mlp_proj": "rowwise"}
        if self.separate:
            plan |= {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value")}
            plan["blocks.*.attention_proj"] = "rowwise"
        return plan

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a text of {length} tokens is longer than block_size, {self.block_size}")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        # Not a view, so that wrappers such as FSDP2 can register hooks on the output.
        return self.head(self.norm(x)).transpose(1, 2).contiguous()


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each on a residual branch.

    Args:
        width: embedding size, a multiple of ``heads``.
        heads: attention heads.
        dropout: probability at the end of each branch.
        kv_heads: heads of keys and values; see :class:`GPT`.
        mlp_width: hidden size of the MLP. None: ``4 * width``.

    Shapes:
        input and output (N, T, width).
    """

    attention = staticmethod(F.scaled_dot_product_attention)  # a strategy may set another one on a block

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, kv_heads: int | None = None, mlp_width: int | None = None
    ) -> None:
        super().__init__()
        self.head_size = width // heads
        mlp_width = mlp_width or 4 * width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width) if kv_heads is None else None
        if kv_heads is not None:
            self.query = nn.Linear(width, width)
            self.key = nn.Linear(width, kv_heads * self.head_size)
            self.value = nn.Linear(width, kv_heads * self.head_size)
        self.attention_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, mlp_width)
        self.mlp_proj = nn.Linear(mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention_proj(self._attend(self.norm1(x))))
        return x + self.dropout(self.mlp_proj(F.gelu(self.mlp(self.norm2(x)))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        if self.qkv is not None:
            qkv = self.qkv(x).view(n, length, 3, -1, self.head_size)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
        else:  # with tensor parallelism each rank has some of the heads
            query, key, value = (
                layer(x).view(n, length, -1, self.head_size).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
        groups: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        attended = self.attention(query, key, value, is_causal=True, **groups)
        return attended.transpose(1, 2).reshape(n, length, -1)


def _reset(layer: Any, std: float) -> None:
    type(layer).reset_parameters(layer)
    nn.init.normal_(layer.weight, std=std)
