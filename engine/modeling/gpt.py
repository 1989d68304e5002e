"""A decoder-only transformer for language models: GPT-2's by default, Llama's by arguments."""

import logging
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from ...hooks.base import HOOK_REGISTRY, HookBase
from ...hooks.common.models import unwrap_model
from .build import MODEL_REGISTRY

__all__ = ["GPT", "SampleText", "TransformerBlock"]

logger = logging.getLogger(__name__)

# (cosines, sines) of shape (T, head size), or None.
_Rotation = tuple[torch.Tensor, torch.Tensor] | None


@MODEL_REGISTRY.register()
class GPT(nn.Module):
    """Predicts the next token at each position of a text.

    The defaults are the transformer of Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2,
    2019): learned positions, pre-norm blocks, and output weights of residual branches scaled down with the depth.
    ``positions="rotary", norm="rms", mlp="swiglu", bias=False`` and ``kv_heads`` make it that of Grattafiori et al.,
    "The Llama 3 Herd of Models", arXiv:2407.21783.

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
        positions: "learned" embeddings, or "rotary" (Su et al., arXiv:2104.09864), which rotate queries and keys.
        rotary_base: base of the rotary wavelengths.
        norm: "layer" for ``LayerNorm``, "rms" for ``RMSNorm``.
        mlp: "gelu", or "swiglu" (Shazeer, arXiv:2002.05202), which has a third layer, ``gate``.
        mlp_width: hidden size of the MLP. None: ``4 * width``.
        bias: whether linear layers have biases.
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
        positions: Literal["learned", "rotary"] = "learned",
        rotary_base: float = 10_000.0,
        norm: Literal["layer", "rms"] = "layer",
        mlp: Literal["gelu", "swiglu"] = "gelu",
        mlp_width: int | None = None,
        bias: bool = True,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        for name, size, divisor, value in (
            ("width", width, "heads", heads),
            ("heads", heads, "kv_heads", heads if kv_heads is None else kv_heads),
        ):
            if value < 1 or size % value:
                raise ValueError(f"{name} must be a multiple of {divisor}, {value}, not {size}")
        if positions == "rotary" and width // heads % 2:
            raise ValueError(f"rotary positions need an even width / heads, not {width // heads}")
        for name, given, known in (
            ("positions", positions, ("learned", "rotary")),
            ("norm", norm, tuple(_NORMS)),
            ("mlp", mlp, ("gelu", "swiglu")),
        ):
            if given not in known:
                raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}", not {given!r}')
        self.block_size, self.head_size, self.rotary_base = block_size, width // heads, rotary_base
        self.gated, self.separate = mlp == "swiglu", kv_heads is not None
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, dropout, kv_heads, norm, mlp, mlp_width, bias) for _ in range(depth)
        )
        self.norm = _NORMS[norm](width)
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
        if self.gated:
            plan["blocks.*.gate"] = "colwise"
        if self.separate:
            plan |= {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value")}
            plan["blocks.*.attention_proj"] = "rowwise"
        return plan

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a text of {length} tokens is longer than block_size, {self.block_size}")
        places = torch.arange(length, device=tokens.device)
        x, rotation = self.tokens(tokens), None
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            rotation = _rotation(places, self.head_size, self.rotary_base)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation)
        # Not a view, so that wrappers such as FSDP2 can register hooks on the output.
        return self.head(self.norm(x)).transpose(1, 2).contiguous()


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each on a residual branch.

    Args:
        width: embedding size, a multiple of ``heads``.
        heads: attention heads.
        dropout: probability at the end of each branch.
        kv_heads: heads of keys and values; see :class:`GPT`, also for the rest.
        norm: "layer" or "rms".
        mlp: "gelu" or "swiglu".
        mlp_width: hidden size of the MLP. None: ``4 * width``.
        bias: whether linear layers have biases.

    Shapes:
        input and output (N, T, width); rotation: two tensors (T, width / heads), or None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        kv_heads: int | None = None,
        norm: Literal["layer", "rms"] = "layer",
        mlp: Literal["gelu", "swiglu"] = "gelu",
        mlp_width: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads or heads, width // heads
        mlp_width = mlp_width or 4 * width
        self.norm1 = _NORMS[norm](width)
        self.qkv = nn.Linear(width, 3 * width, bias) if kv_heads is None else None
        if kv_heads is not None:
            self.query = nn.Linear(width, width, bias)
            self.key = nn.Linear(width, kv_heads * self.head_size, bias)
            self.value = nn.Linear(width, kv_heads * self.head_size, bias)
        self.attention_proj = nn.Linear(width, width, bias)
        self.norm2 = _NORMS[norm](width)
        self.gate = nn.Linear(width, mlp_width, bias) if mlp == "swiglu" else None
        self.mlp = nn.Linear(width, mlp_width, bias)
        self.mlp_proj = nn.Linear(mlp_width, width, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, rotation: _Rotation = None) -> torch.Tensor:
        x = x + self.dropout(self.attention_proj(self._attend(self.norm1(x), rotation)))
        y = self.norm2(x)
        hidden = F.gelu(self.mlp(y)) if self.gate is None else F.silu(self.gate(y)) * self.mlp(y)
        return x + self.dropout(self.mlp_proj(hidden))

    def _attend(self, x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
        n, length, _ = x.shape
        if self.qkv is not None:
            qkv = self.qkv(x).view(n, length, 3, -1, self.head_size)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
        else:  # with tensor parallelism each rank has some of the heads
            query, key, value = (
                layer(x).view(n, length, -1, self.head_size).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
        if rotation is not None:
            query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        groups: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, **groups)
        return attended.transpose(1, 2).reshape(n, length, -1)


def _reset(layer: Any, std: float) -> None:
    type(layer).reset_parameters(layer)
    nn.init.normal_(layer.weight, std=std)


_NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": partial(nn.RMSNorm, eps=1e-5)}


def _rotation(places: torch.Tensor, size: int, base: float) -> _Rotation:
    """Return cosines and sines of the angles at each position, for heads of this size."""
    wavelengths = base ** (torch.arange(0, size, 2, device=places.device) / size)
    angles = places[..., None] / wavelengths
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + size / 2) of each head, as in Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


@HOOK_REGISTRY.register()
class SampleText(HookBase):
    """Lets a :class:`GPT` on bytes continue a prompt after each evaluation.

    Logs the text, and puts it into the storage as "sample".

    Args:
        prompt: the beginning.
        length: bytes to add.
        temperature: below 1, likelier bytes are preferred.
        seed: of the drawing; other random numbers do not change.
    """

    def __init__(self, prompt: str, length: int = 120, temperature: float = 0.7, seed: int = 0) -> None:
        self._prompt, self._length, self._temperature, self._seed = prompt, length, temperature, seed

    @torch.no_grad()
    def after_eval(self, results: Any) -> None:
        model: Any = unwrap_model(self.trainer.model)
        device, training = next(model.parameters()).device, model.training
        generator = torch.Generator(device).manual_seed(self._seed)
        tokens = torch.tensor([list(self._prompt.encode())], device=device)
        model.eval()
        for _ in range(self._length):
            scores = model(tokens[:, -model.block_size :])[0, :, -1] / self._temperature
            drawn = torch.multinomial(scores.softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn[None]], dim=1)
        model.train(training)
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        logger.info("Sample: %s", text)
        self.trainer.storage.put_text("sample", text)
