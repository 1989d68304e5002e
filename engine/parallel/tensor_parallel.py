"""Tensor parallelism: splits the layers of a model over ranks, by a plan of words for its modules."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, suggest
from ...hooks.common.models import describe_no_match, matches
from ...hooks.common.tensors import local_part

__all__ = ["Plan", "check_plan", "check_words", "differing_copies", "find_plan", "parallelize", "scores_layer"]

Plan = Mapping[str, Any]
"""Words, or torch's ``ParallelStyle`` objects, by pattern of module names."""

_ARROW = "->"
_SPLITS = ("colwise", "rowwise")
_LAYOUTS = ("replicate", "sequence")
# Names of layers whose outputs are several parts one after another, such as queries, keys and values.
_FUSED = ("qkv", "qkv_proj", "Wqkv", "c_attn", "in_proj", "gate_up_proj")
# Attributes in which modules keep their number of heads.
_HEADS = (
    *("heads", "num_heads", "n_heads", "n_head", "num_attention_heads"),
    *("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"),
)


def find_plan(plan: Plan | None, model: nn.Module) -> Plan:
    """Return the plan of the config, or the model's own ``tensor_parallel_plan`` (an attribute or a method).

    Raises:
        ConfigError: there is neither.
    """
    if plan:
        return plan
    own = getattr(model, "tensor_parallel_plan", None)
    own = own() if callable(own) else own
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
        _style(name, model, word, ranks, False)


def parallelize(model: nn.Module, mesh: Any, plan: Plan, sharded_scores: str = "") -> None:
    """Split the layers that a plan names over the ranks of a mesh. Tied parameters stay tied.

    Args:
        model: the model, the same on all ranks; it may be on the meta device.
        mesh: a DeviceMesh of one dimension.
        plan: what happens to which modules.
        sharded_scores: name of the layer whose output stays split over classes, for torch's ``loss_parallel``.

    Raises:
        ConfigError: the plan does not fit the model or the number of ranks.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    words = _assign(model, plan)
    styles = {name: _style(name, model, word, mesh.size(), name == sharded_scores) for name, word in words.items()}
    places = _places(model)
    trainable = {key: value[0][0]._parameters[value[0][1]].requires_grad for key, value in places.items()}  # type: ignore[union-attr]
    for name, style in styles.items():
        if style is not None:
            # All ranks have the same values, so none are exchanged.
            parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for key, users in places.items():
        found = [module._parameters[own] for module, own, _ in users]
        found[0].requires_grad_(trainable[key])  # type: ignore[union-attr]
        if any(_placements(one) != _placements(found[0]) for one in found):
            names = " and ".join(name for _, _, name in users)
            raise ConfigError(
                f"PARALLEL.ARGS.plan: {names} are one parameter, and the plan splits them differently. Split both "
                'alike: "rowwise" for an Embedding and "colwise" for a Linear both split the vocabulary'
            )
        for module, own, _ in users:
            module._parameters[own] = found[0]


def scores_layer(model: nn.Module, plan: Plan) -> str:
    """Return the name of the layer that computes the scores of all classes: the Linear with "colwise->replicate".

    Raises:
        ConfigError: there is none, or several.
    """
    found = [
        name
        for name, word in _assign(model, plan).items()
        if isinstance(word, str)
        and isinstance(model.get_submodule(name), nn.Linear)
        and _parse(name, word)[1:] == ("colwise", "replicate")
    ]
    if len(found) != 1:
        raise ConfigError(
            "PARALLEL.ARGS.loss_parallel: needs one Linear in the plan, the last layer, with "
            f'"colwise->replicate"; there are {len(found)}'
        )
    return found[0]


@torch.no_grad()
def differing_copies(model: nn.Module, mesh: Any) -> list[str]:
    """Return the names of parameters that the ranks of a mesh should have copies of, and that differ.

    All ranks call it together.
    """
    (dim,) = mesh.mesh_dim_names
    names, sums = [], []
    for name, parameter in model.named_parameters():
        placements = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))  # type: ignore[attr-defined]
        if dim not in placements or placements[dim].is_replicate():
            part = local_part(parameter).double()
            names.append(name)
            sums += [part.sum(), part.abs().sum()]
    if not sums:
        return []
    values = torch.stack(sums)
    largest, smallest = values.clone(), values.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=mesh.get_group())
    spread, size = (largest - smallest).view(-1, 2).amax(dim=1), largest.view(-1, 2)[:, 1]
    return [name for name, differs in zip(names, (spread > 1e-3 * size).tolist(), strict=True) if differs]


# ---------------------------------------------------------------------------- the plan


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


def _check_pairs(model: nn.Module, words: Mapping[str, Any]) -> None:
    """Check that both kinds of layers are there: one leaves its output split, the other takes it."""
    if not all(isinstance(word, str) for word in words.values()):
        return
    parsed = {name: _parse(name, word) for name, word in words.items()}
    giving = [name for name, (_, style, after) in parsed.items() if style == "colwise" and not after]
    taking = [
        name
        for name, (before, style, _) in parsed.items()
        if style == "rowwise" and not before and not isinstance(model.get_submodule(name), nn.Embedding)
    ]
    if giving and not taking:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {giving[0]} is "colwise", which leaves its output split, and no "rowwise" layer '
            'takes it. Add the next Linear as "rowwise", or use "colwise->replicate"'
        )
    if taking and not giving:
        raise ConfigError(
            f'PARALLEL.ARGS.plan: {taking[0]} is "rowwise", which takes the split output of a "colwise" layer, and '
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
    parts = [part.strip() for part in word.split(_ARROW)]
    for part in parts:
        if part not in (*_SPLITS, *_LAYOUTS):
            raise ConfigError(
                f"PARALLEL.ARGS.plan[{pattern!r}]: {word!r} is not known{suggest(part, (*_SPLITS, *_LAYOUTS))}. "
                'Use "colwise", "rowwise", "sequence" or "replicate", with layouts of input and output if they '
                'differ from the usual: "sequence->colwise->replicate"'
            )
    styles = [part for part in parts if part in _SPLITS]
    if len(styles) == 1 and len(parts) <= 3:
        before, after = parts[: parts.index(styles[0])], parts[parts.index(styles[0]) + 1 :]
        if len(before) <= 1 and len(after) <= 1:
            return "".join(before), styles[0], "".join(after)
    if parts in (["sequence"], ["replicate"]):
        return "", parts[0], ""
    if parts in (["sequence", "replicate"], ["replicate", "sequence"]):
        return parts[0], "", parts[1]
    raise ConfigError(
        f'PARALLEL.ARGS.plan[{pattern!r}]: {word!r} must be "colwise" or "rowwise", with at most one layout before '
        'and one after it; "sequence"; "replicate"; "sequence->replicate" or "replicate->sequence"'
    )


def _style(name: str, model: nn.Module, word: Any, ranks: int, sharded_scores: bool) -> Any:
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

    layouts = {"replicate": Replicate(), "sequence": Shard(1), "": None}
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
    given: dict[str, Any] = {"input_layouts": layouts[before], "output_layouts": layouts[after]}
    if style == "rowwise" and isinstance(module, nn.Embedding) and not before:
        given["input_layouts"] = Replicate()
    given = {key: layout for key, layout in given.items() if layout is not None}
    if sharded_scores:
        return ColwiseParallel(**{**given, "output_layouts": Shard(-1)}, use_local_output=False)
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


# ---------------------------------------------------------------------------- parameters


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str, str]]]:
    """Return where each parameter is: module, key and full name. A tied parameter has several places."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key, f"{prefix}.{key}" if prefix else key))
    return places


def _placements(parameter: torch.Tensor | None) -> Iterable[Any]:
    return getattr(parameter, "placements", ())
