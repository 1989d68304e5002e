"""Compiling with inductor: a workaround for an error in its sums, and a quicker start.

Imported only where something is compiled: importing inductor takes a second.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any

import torch
import torch._inductor.codecache  # here, since imports of torch from two threads at a time may fail
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["check_vectors", "exact_sums"]

PASS = "post_grad_custom_pre_pass"


def exact_sums(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` with which ``torch.add(a, b, alpha=k)`` is ``a + k * b``.

    Inductor fuses a sum with a matrix product into ``addmm`` and drops ``alpha`` (torch 2.13). Optimizers add weight
    decay that way to gradients, which are matrix products for linear layers: the decay would be 1. A pass that runs
    first replaces the factor by a product.

    Args:
        args: the arguments of the user. Custom passes in their options, or in inductor's config, run first.

    Returns:
        The arguments with the pass among ``options``. The options of ``mode`` are included, since torch accepts only
        one of the two. ``args`` unchanged for other backends, and for arguments that torch refuses.
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
    own = options.get(PASS, getattr(inductor_config, PASS))
    passes = own if isinstance(own, list | tuple) else () if own is None else (own,)
    options[PASS] = _exact(tuple(passes))
    return {**{name: value for name, value in args.items() if name != "mode"}, "options": options}


class _ExactSums(CustomGraphPass):
    """Replaces ``add(a, b, alpha=k)`` by ``add(a, mul(b, k))``, after other passes."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        _wait_for_check()
        for other in self.before:
            other(graph)
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

    def uuid(self) -> Any | None:
        """Identify the pass in torch's cache. Torch calls this before it loads a graph from there."""
        _wait_for_check()
        others = [getattr(other, "uuid", _none)() for other in self.before]
        return None if None in others else (get_hash_for_files((__file__,)), *others)


# The same object for the same passes: torch does not compile again for an equal backend.
_exact = cache(_ExactSums)


_checks: list[Thread] = []
"""The thread that checks the CPU's vector instructions, once it has been started."""


def check_vectors() -> None:
    """Check the CPU's vector instructions in a thread, while the main thread traces.

    Inductor does it once per process, before it loads or compiles C++, and waits a second or more for child processes.
    """
    if not _checks:
        _checks.append(Thread(target=_check_vectors, daemon=True))
        _checks[0].start()


def _check_vectors() -> None:
    with suppress(Exception):  # inductor checks again when it needs the result, and raises then
        cpu_vec_isa.valid_vec_isa_list()


def _wait_for_check() -> None:
    """Wait for the thread, since two checks at a time may disturb each other."""
    for thread in _checks:
        thread.join()


def _call(graph: torch.fx.graph.Graph, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*[arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args])
    return node


def _none() -> None:
    pass
