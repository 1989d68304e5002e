"""Tensor parallelism: splits the layers of a model over ranks, by a plan of words for its modules."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, suggest
from ...config.errors import first_line
from ...hooks.common.models import describe_no_match, matches
from ...hooks.common.rng import gpus_of, preserve_rng
from .. import comm
from .meta_init import places_of

__all__ = [
    "Plan",
    "check_plan",
    "check_words",
    "comparing_widths",
    "find_plan",
    "parallelize",
    "splits",
]

logger = logging.getLogger(__name__)

Plan = Mapping[str, Any]
"""Words, or torch's ``ParallelStyle`` objects, by pattern of module names."""

_LAYOUTS = ("replicate", "sequence")
_SPLIT = re.compile(r"(?:(replicate|sequence)->)?(colwise|rowwise)(?:->(replicate|sequence))?")
# Names of layers whose outputs are several parts one after another, such as queries, keys and values.
_FUSED = ("qkv", "qkv_proj", "Wqkv", "c_attn", "in_proj", "gate_up_proj")
# Attributes in which modules keep their number of heads.
_HEADS = (
    *("heads", "num_heads", "n_heads", "n_head", "num_attention_heads"),
    *("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"),
)
# The styles of the plans in transformers, as words. "replicated_with_grad_allreduce" is a norm of each head.
_TRANSFORMERS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicate": "replicate",
    "colwise_rep": "colwise->replicate",
    "colwise_gather_output": "colwise->replicate",
    "embedding_colwise": "colwise->replicate",
    "rowwise_rep": "rowwise",
    "embedding_rowwise": "rowwise",
    "rowwise_split_input": "replicate->rowwise",
    "replicated_with_grad_allreduce": "",
}


def find_plan(plan: Plan | None, model: nn.Module) -> Plan:
    """Return the plan of the config, or the model's own: ``tensor_parallel_plan`` (an attribute or a method), or the
    ``_tp_plan`` of a model of transformers.

    Raises:
        ConfigError: there is none, or one of its styles cannot be used.
    """
    if plan:
        return plan
    own = getattr(model, "tensor_parallel_plan", None)
    own = own() if callable(own) else own
    own = own or _transformers_plan(model)
    if not own or not isinstance(own, Mapping):
        raise ConfigError(
            f"PARALLEL.ARGS.plan: tensor parallelism needs a plan, and {type(model).__name__} has no "
            'tensor_parallel_plan. Name the layers to split, for example {"blocks.*.mlp": "colwise", '
            '"blocks.*.mlp_proj": "rowwise"}'
        )
    return own


def check_words(plan: Plan) -> None:
    """Check the words of a plan.

    Raises:
        ConfigError: one is wrong.
    """
    for pattern, word in plan.items():
        if isinstance(word, str):
            _parse(pattern, word)
            continue
        from torch.distributed.tensor.parallel import ParallelStyle

        if not isinstance(word, ParallelStyle):
            raise ConfigError(f'PARALLEL.ARGS.plan[{pattern!r}]: must be a word such as "colwise", not {word!r}')


def check_plan(model: nn.Module, plan: Plan, ranks: int) -> None:
    """Check that a plan fits a model, which may be on the meta device, and a number of ranks. Nothing is changed.

    Raises:
        ConfigError: it does not.
    """
    for name, word in _assign(model, plan).items():
        _style(name, model, word, ranks)


def parallelize(model: nn.Module, mesh: Any, plan: Plan) -> None:
    """Split the layers that a plan names over the ranks of a mesh. Tied parameters stay tied.

    Args:
        model: the model, the same on all ranks; it may be on the meta device.
        mesh: a DeviceMesh of one dimension.
        plan: what happens to which modules.

    Raises:
        ConfigError: the plan does not fit the model or the number of ranks.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles = {name: _style(name, model, word, mesh.size()) for name, word in _assign(model, plan).items()}
    places = places_of(model)
    trainable = [getattr(owner, key).requires_grad for (owner, key, _), *_ in places.values()]
    for name, style in styles.items():
        if style is not None:
            # All ranks have the same values, so none are exchanged.
            parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for users, trains in zip(places.values(), trainable, strict=True):
        found: list[Any] = [getattr(owner, key) for owner, key, _ in users]
        found[0].requires_grad_(trains)
        if len({getattr(one, "placements", ()) for one in found}) > 1:
            names = " and ".join(name for _, _, name in users)
            raise ConfigError(
                f"PARALLEL.ARGS.plan: {names} are one parameter, and the plan splits them differently. Split both "
                'alike: "rowwise" for an Embedding and "colwise" for a Linear both split the vocabulary'
            )
        for owner, key, _ in users:
            setattr(owner, key, found[0])


def splits(parameter: Any, dim: str) -> bool:
    """Whether a parameter is split over a dimension of its mesh, by the dimension's name."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or dim not in mesh.mesh_dim_names:
        return False
    split: bool = not parameter.placements[mesh.mesh_dim_names.index(dim)].is_replicate()
    return split


@contextmanager
def comparing_widths(model: nn.Module, mesh: Any, plan: Plan) -> Iterator[None]:
    """Check in the model's first forward pass in the block that nothing between split layers needs the whole width.

    Two more passes are compared. In the second, each layer that leaves its output split has it gathered, and each
    layer that takes a split input takes its part of the whole one. What is between them then computes over the whole
    width, as in one process. All ranks call the model together.

    Args:
        model: the model, whose layers are split.
        mesh: the ranks that split them.
        plan: how.

    Raises:
        ConfigError: in the forward pass: a layer's input differs by more than rounding.
    """
    from torch.distributed.tensor import DTensor, Shard

    giving, taking = _ends(model, _assign(model, plan))
    usual: list[torch.Tensor] = []  # some rows of the inputs of the layers in `taking`, in the order of their calls
    found: list[str] = []

    def gather(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False).full_tensor()

    def take(name: str, args: Any) -> Any:
        part = args[0].chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]
        expected = usual.pop(0)
        rounding = max(1e-3, 2 * torch.finfo(part.dtype).eps)
        if (_some_rows(part) - expected).norm() > rounding * expected.norm():
            found.append(name)
        return part, *args[1:]

    @contextmanager
    def hooked(whole: bool) -> Iterator[None]:
        with ExitStack() as hooks:
            for name in taking:
                keep = lambda module, args: usual.append(_some_rows(args[0]))  # noqa: E731
                check = lambda module, args, name=name: take(name, args)  # noqa: E731
                layer = model.get_submodule(name)
                hooks.callback(layer.register_forward_pre_hook(check if whole else keep, prepend=True).remove)
            for name in giving if whole else ():
                hooks.callback(model.get_submodule(name).register_forward_hook(gather).remove)
            yield

    def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first.remove()
        try:
            for whole in (False, True):
                with torch.no_grad(), preserve_rng(gpus_of(model)), hooked(whole):
                    module(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:  # the model expects its part of the width
            found.clear()
            logger.info("PARALLEL.ARGS.plan: not compared with whole layers (%s)", first_line(error))
        if problem := next((names[0] for names in comm.all_gather(found) if names), ""):
            raise ConfigError(
                f"PARALLEL.ARGS.plan: an operation before {problem}, such as softmax or a norm, needs the whole width, "
                'and each rank has a part of it. Use "colwise->replicate" for the layer before it and '
                f'"replicate->rowwise" for {problem}'
            )

    first = model.register_forward_hook(compare, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled model would keep these hooks
            yield
    finally:
        first.remove()


def _some_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])[:64].float()


# ---------------------------------------------------------------------------- the plan


def _transformers_plan(model: nn.Module) -> Plan:
    """Return the plan of a model of transformers; empty if it has none."""
    from torch.distributed.tensor.parallel import SequenceParallel

    plan, names = {}, [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for pattern, style in (getattr(model, "_tp_plan", None) or {}).items():
        if not any(matches(pattern, name) for name in names):
            continue  # a layer that this model does not have
        if style not in _TRANSFORMERS:
            raise ConfigError(
                f"PARALLEL.ARGS.plan: the model's own plan has the style {style!r} for {pattern}, which cannot be used "
                "here. Write a plan of the layers to split"
            )
        # "": a norm that each rank computes for its heads, with one weight for all heads
        plan[pattern] = _TRANSFORMERS[style] or SequenceParallel(sequence_dim=-2, use_local_output=True)
    return plan


def _assign(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return the word of each module that the plan names, by the module's name.

    Raises:
        ConfigError: a pattern matches nothing, two match the same module, or one is missing.
    """
    words: dict[str, Any] = {}
    by_pattern: dict[str, str] = {}
    for pattern, word in plan.items():
        fitting = [name for name, module in model.named_modules() if name and matches(pattern, name, module)]
        if not fitting:
            raise ConfigError(f"PARALLEL.ARGS.plan: {describe_no_match(model, pattern)}")
        for name in fitting:
            if words.setdefault(name, word) != word:
                raise ConfigError(
                    f"PARALLEL.ARGS.plan: {by_pattern[name]!r} and {pattern!r} both match {name}, with different words"
                )
            by_pattern[name] = pattern
    if any(isinstance(word, str) and "sequence" in word for word in words.values()):
        _check_complete(model, words)
    _check_pairs(model, words)
    return words


def _ends(model: nn.Module, words: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the layers that leave their outputs split, and of those that take split inputs."""
    giving, taking = [], []
    for name, word in words.items():
        before, style, after = _parse(name, word) if isinstance(word, str) else ("", "", "")
        if style == "colwise" and not after:
            giving.append(name)
        if style == "rowwise" and not before and not isinstance(model.get_submodule(name), nn.Embedding):
            taking.append(name)
    return giving, taking


def _check_pairs(model: nn.Module, words: Mapping[str, Any]) -> None:
    """Check that both kinds of layers are there: one leaves its output split, the other takes it."""
    giving, taking = _ends(model, words)
    if bool(giving) == bool(taking) or not all(isinstance(word, str) for word in words.values()):
        return
    raise ConfigError(
        f'PARALLEL.ARGS.plan: {giving[0]} is "colwise", which leaves its output split, and no "rowwise" layer '
        'takes it. Add the next Linear as "rowwise", or use "colwise->replicate"'
        if giving
        else f'PARALLEL.ARGS.plan: {taking[0]} is "rowwise", which takes the split output of a "colwise" layer, and '
        'there is none. Add the Linear before it as "colwise", or use "replicate->rowwise"'
    )


def _check_complete(model: nn.Module, words: Mapping[str, Any]) -> None:
    """With sequences split over ranks, the gradients of a whole module would cover one rank's part only."""
    for name, module in model.named_modules():
        if name not in words and next(module.parameters(recurse=False), None) is not None:
            raise ConfigError(
                f"PARALLEL.ARGS.plan: it splits sequences, so every module with parameters needs a word, and "
                f'{name or "the model itself"} ({type(module).__name__}) has none. Use "sequence" if its input is '
                'split, "replicate" if it is whole'
            )


def _parse(pattern: str, word: str) -> tuple[str, str, str]:
    """Return the layout of the input, the style, and the layout of the output; "" stands for the style's own.

    Raises:
        ConfigError: the word is wrong.
    """
    parts = word.replace(" ", "").split("->")
    if found := _SPLIT.fullmatch("->".join(parts)):
        return found[1] or "", found[2], found[3] or ""
    if len(parts) == 1 and word in _LAYOUTS:
        return "", word, ""
    if len(parts) == 2 and set(parts) == set(_LAYOUTS):
        return parts[0], "", parts[1]
    known = ("colwise", "rowwise", *_LAYOUTS)
    hint = next((suggest(part, known) for part in parts if part not in known), "")
    raise ConfigError(
        f'PARALLEL.ARGS.plan[{pattern!r}]: {word!r} is not known{hint or "."} Use "colwise" or "rowwise", with at most '
        'one layout ("replicate", "sequence") before it and one after it, as in "sequence->colwise->replicate"; '
        '"sequence"; "replicate"; "sequence->replicate" or "replicate->sequence"'
    )


def _style(name: str, model: nn.Module, word: Any, ranks: int) -> Any:
    """Return torch's style for a word; None: the module is not changed.

    Raises:
        ConfigError: the module cannot be split like this.
    """
    if not isinstance(word, str):
        return word
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    layouts = {"replicate": Replicate(), "sequence": Shard(1)}
    module = model.get_submodule(name)
    before, style, after = _parse(name, word)
    if style == "replicate":
        return None
    if style == "sequence":
        return SequenceParallel(use_local_output=True)
    if not style:
        return PrepareModuleInput(input_layouts=layouts[before], desired_input_layouts=layouts[after])
    _check_split(name, model, module, style, ranks)
    if style == "colwise" and not after and name.rpartition(".")[2] in _FUSED:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {name} computes several parts in one layer, and "colwise" would give each rank a '
            "piece of the whole instead of a piece of each part. Use a layer for each part (in GPT: "
            'kv_heads), or "colwise->replicate"'
        )
    if style == "rowwise" and isinstance(module, nn.Embedding):
        before = before or "replicate"
    # None: the style's own layout
    given: Any = {"input_layouts": layouts.get(before), "output_layouts": layouts.get(after)}
    return (ColwiseParallel if style == "colwise" else RowwiseParallel)(**given)


def _check_split(name: str, model: nn.Module, module: nn.Module, style: str, ranks: int) -> None:
    """Check that a module can be split over a number of ranks."""
    if isinstance(module, nn.Linear):
        what = "out_features" if style == "colwise" else "in_features"
    elif isinstance(module, nn.Embedding):
        what = "embedding_dim" if style == "colwise" else "num_embeddings"
    else:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {name} is a {type(module).__name__}, and "{style}" splits Linear and Embedding only'
        )
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    sizes = {f"{what} of {name}": getattr(module, what)}
    if isinstance(module, nn.Linear):
        sizes |= {f"{key} of {parent_name or type(model).__name__}": getattr(parent, key, None) for key in _HEADS}
    for key, size in sizes.items():
        if isinstance(size, int) and size % ranks:
            raise ConfigError(
                f"PARALLEL.ARGS.tensor: {ranks} ranks cannot split the {key}, {size}, evenly. Use a divisor of {size}"
            )
