"""Compiling with inductor: a workaround for an error in its sums.

Imported only where something is compiled: importing inductor takes a second.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ...config import ConfigError

__all__ = ["exact_sums"]

PASS = "post_grad_custom_pre_pass"


def exact_sums(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` with which ``torch.add(a, b, alpha=k)`` is ``a + k * b``.

    Inductor fuses a sum with a matrix product into ``addmm`` and drops ``alpha`` (torch 2.13). Optimizers add weight
    decay that way to gradients, which are matrix products for linear layers: the decay would be 1. A pass that runs
    first replaces the factor by a product.

    Args:
        args: the arguments of the user.

    Returns:
        The arguments with the pass among ``options``. The options of ``mode`` are included, since torch accepts only
        one of the two. ``args`` unchanged for other backends, and for arguments that torch refuses.

    Raises:
        ConfigError: the options, or inductor's config, have such a pass already.
    """
    args = dict(args)
    mode, options = args.get("mode"), args.get("options")
    if args.get("backend", "inductor") != "inductor" or (mode is not None and options is not None):
        return args
    options = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    if mode is not None:
        if mode not in list_mode_options():
            return args
        options = dict(list_mode_options(mode, args.get("dynamic")))
    if options.get(PASS, getattr(inductor_config, PASS)) is not None:
        raise ConfigError(f"{PASS} of torch.compile is set, and is needed for a correction of weight decay: unset it")
    return {**{name: value for name, value in args.items() if name != "mode"}, "options": {**options, PASS: _EXACT}}


class _ExactSums(CustomGraphPass):
    """Replaces ``add(a, b, alpha=k)`` by ``add(a, mul(b, k))``."""

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
        convert = torch.ops.prims.convert_element_type.default
        for node in graph.find_nodes(op="call_function", target=add):
            alpha, addend = node.kwargs.get("alpha", 1), node.args[1]
            if not isinstance(addend, torch.fx.Node) or (not isinstance(alpha, torch.fx.Node) and alpha == 1):
                continue
            if not isinstance(addend.meta["val"], torch.Tensor):
                continue  # a number, not a matrix product
            with graph.inserting_before(node):
                # Convert first, so that the product is not rounded more than the sum.
                dtype = node.meta["val"].dtype
                if addend.meta["val"].dtype != dtype:
                    addend = _call(graph, convert, addend, dtype)
                product = _call(graph, mul, addend, alpha)
            node.args = (node.args[0], product)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}

    def uuid(self) -> Any:
        """Identify the pass in torch's cache."""
        return get_hash_for_files((__file__,))


# One object: torch does not compile again for an equal backend.
_EXACT = _ExactSums()


def _call(graph: torch.fx.graph.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*[arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args])
    return node
