"""Compiling with inductor: a workaround for an error in its sums.

Imported only where something is compiled: importing inductor takes a second.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ...config import ConfigError

__all__ = ["use_exact_sums"]

PASS = "post_grad_custom_pre_pass"


def use_exact_sums(args: Mapping[str, Any]) -> None:
    """Let inductor compile ``torch.add(a, b, alpha=k)`` as ``a + k * b``, in this process from now on.

    Inductor fuses a sum with a matrix product into ``addmm`` and drops ``alpha`` (torch 2.13). Optimizers add weight
    decay that way to gradients, which are matrix products for linear layers: the decay would be 1. A pass that runs
    first replaces the factor by a product.

    Args:
        args: the user's arguments of ``torch.compile``.

    Raises:
        ConfigError: the options among them, or inductor's config, have such a pass already.
    """
    options = {name.replace("-", "_"): value for name, value in (args.get("options") or {}).items()}
    if options.get(PASS) is not None or getattr(inductor_config, PASS) not in (None, _EXACT):
        raise ConfigError(f"{PASS} of torch.compile is set, and is needed for a correction of weight decay: unset it")
    setattr(inductor_config, PASS, _EXACT)


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


_EXACT = _ExactSums()


def _call(graph: torch.fx.graph.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*[arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args])
    return node
