"""A small decoder-only transformer for the language example."""

import torch
from torch import nn
from torch.nn import functional as F

from .build import MODEL_REGISTRY

__all__ = ["GPT", "TransformerBlock"]


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

    Shapes:
        input (N, T) int64, T <= block_size; output (N, vocab_size, T): scores for the token after each position,
        with the classes in the dimension where ``CrossEntropyLoss`` and ``Accuracy`` expect them.

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``, or the text is too long.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, {heads}, not {width}")
        self.block_size = block_size
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a text of {length} tokens is longer than block_size, {self.block_size}")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.blocks(self.dropout(x))
        # Not a view, so that wrappers such as FSDP2 can register hooks on the output.
        return self.head(self.norm(x)).transpose(1, 2).contiguous()


class TransformerBlock(nn.Module):
    """Causal self-attention and a two-layer MLP, each on a residual branch.

    Args:
        width: embedding size, a multiple of ``heads``.
        heads: attention heads.
        dropout: probability at the end of each branch.

    Shapes:
        input and output (N, T, width).
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(n, length, width)
        x = x + self.dropout(self.attention_proj(attended))
        return x + self.dropout(self.mlp_proj(F.gelu(self.mlp(self.norm2(x)))))
