"""Tensor parallelism: splits the layers of a model over ranks, by a plan of words for its modules."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import ConfigError, suggest
from ...hooks.common import describe_no_match, matches
from .meta_init import places_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.device_mesh import DeviceMesh

Plan = Mapping[str, Any]
"""Words, or torch's ``ParallelStyle`` objects, by pattern of module names."""

_WORDS = ("colwise", "colwise->replicate", "rowwise", "replicate->rowwise", "replicate")
# Names of layers whose outputs are several parts one after another, such as queries, keys and values.
_FUSED = ("qkv", "qkv_proj", "Wqkv", "c_attn", "in_proj", "gate_up_proj")
# Styles of plans in transformers with another name here. "replicated_with_grad_allreduce" is a norm of each head.
_TRANSFORMERS = {
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
    found = getattr(model, "tensor_parallel_plan", None)
    found = found() if callable(found) else found
    found = found or _transformers_plan(model)
    if not found or not isinstance(found, Mapping):
        raise ConfigError(
            f"PARALLEL.ARGS.plan: tensor parallelism needs a plan, and {type(model).__name__} has no "
            'tensor_parallel_plan. Name the layers to split, for example {"blocks.*.mlp": "colwise", '
            '"blocks.*.mlp_proj": "rowwise"}'
        )
    check_words(found)
    return found


def check_words(plan: Plan) -> None:
    """Check the words of a plan.

    Raises:
        ConfigError: one is wrong.
    """
    for pattern, word in plan.items():
        if isinstance(word, str):
            if word not in _WORDS:
                raise ConfigError(
                    f"PARALLEL.ARGS.plan[{pattern!r}]: {word!r} is not known{suggest(word, _WORDS) or '.'} "
                    f"Use one of: {', '.join(_WORDS)}"
                )
            continue
        from torch.distributed.tensor.parallel import ParallelStyle

        if not isinstance(word, ParallelStyle):
            raise ConfigError(f'PARALLEL.ARGS.plan[{pattern!r}]: must be a word such as "colwise", not {word!r}')


def parallelize(model: nn.Module, mesh: "DeviceMesh", plan: Plan) -> None:
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


def splits(parameter: torch.Tensor, dim: str) -> bool:
    """Whether a parameter is split over a dimension of its mesh, by the dimension's name."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or dim not in mesh.mesh_dim_names:
        return False
    placements = parameter.placements  # type: ignore[attr-defined]
    return not placements[mesh.mesh_dim_names.index(dim)].is_replicate()


# ---------------------------------------------------------------------------- the plan


def _transformers_plan(model: nn.Module) -> Plan:
    """Return the plan of a model of transformers; empty if it has none."""
    from torch.distributed.tensor.parallel import SequenceParallel

    plan, names = {}, [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for pattern, style in (getattr(model, "_tp_plan", None) or {}).items():
        if not any(matches(pattern, name) for name in names):
            continue  # a layer that this model does not have
        word = _TRANSFORMERS.get(style, style)
        if word and word not in _WORDS:
            raise ConfigError(
                f"PARALLEL.ARGS.plan: the model's own plan has the style {style!r} for {pattern}, which cannot be used "
                "here. Write a plan of the layers to split"
            )
        # "": a norm that each rank computes for its heads, with one weight for all heads
        plan[pattern] = word or SequenceParallel(sequence_dim=-2, use_local_output=True)
    return plan


def _assign(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return the word of each module that the plan names, by the module's name.

    Raises:
        ConfigError: a pattern matches nothing, or two match the same module.
    """
    words: dict[str, Any] = {}
    for pattern, word in plan.items():
        fitting = [name for name, module in model.named_modules() if name and matches(pattern, name, module)]
        if not fitting:
            raise ConfigError(f"PARALLEL.ARGS.plan: {describe_no_match(model, pattern)}")
        for name in fitting:
            if words.setdefault(name, word) != word:
                raise ConfigError(
                    f"PARALLEL.ARGS.plan: {pattern!r} and an earlier pattern match {name}, with different words"
                )
    return words


def _style(name: str, model: nn.Module, word: Any, ranks: int) -> Any:
    """Return torch's style for a word; None: the module is not changed.

    Raises:
        ConfigError: the module cannot be split like this.
    """
    if not isinstance(word, str):
        return word
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if word == "replicate":
        return None
    module = model.get_submodule(name)
    _check_split(name, module, word, ranks)
    if word == "colwise->replicate":
        return ColwiseParallel(output_layouts=Replicate())
    if word == "colwise":
        return ColwiseParallel()
    if word == "replicate->rowwise" or isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel()


def _check_split(name: str, module: nn.Module, word: str, ranks: int) -> None:
    """Check that a module can be split over a number of ranks."""
    if isinstance(module, nn.Linear):
        size = module.out_features if word.startswith("colwise") else module.in_features
    elif isinstance(module, nn.Embedding):
        size = module.embedding_dim if word.startswith("colwise") else module.num_embeddings
    else:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {name} is a {type(module).__name__}, and "{word}" splits Linear and Embedding only'
        )
    if size % ranks:
        raise ConfigError(
            f'PARALLEL.ARGS.tensor: {ranks} ranks cannot split {name} ("{word}"), of size {size}, evenly. Use a '
            f"divisor of {size}"
        )
    if word == "colwise" and name.rpartition(".")[2] in _FUSED:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {name} computes several parts in one layer, and "colwise" would give each rank a '
            "piece of the whole instead of a piece of each part. Use a layer for each part (in GPT: "
            'kv_heads), or "colwise->replicate"'
        )
