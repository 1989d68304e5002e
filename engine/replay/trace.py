"""``trace_steps``: digests of everything in a run's first steps, to compare two runs."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from ... import hooks
from ...config import CfgNode
from ...hooks.base import HookBase
from ...hooks.common.batches import convert, samples_in
from ...hooks.common.digest import digest
from ...hooks.common.models import unwrap_model
from ...hooks.common.rng import capture_rng
from ...hooks.control.interruption import EXIT_AGAIN
from ..data import is_deterministic
from ..data.index_stream import reason_without_indices
from ..defaults import DefaultTrainer
from ..setup.logger import console_kept, set_console_level
from ..setup.start import default_setup

__all__ = ["Entry", "Trace", "trace_steps"]

# Hooks that only save or evaluate.
_LEFT_OUT = (
    *(hooks.PeriodicCheckpointer, hooks.BestCheckpointer, hooks.ExceptionCheckpointer),
    *(hooks.EvalHook, hooks.PreciseBN, hooks.SanityCheck),
)


NO_VERSION = " does not have a deterministic implementation"
"""What torch says of an operation, in errors and warnings."""


class Entry(NamedTuple):
    """One value of a step, or one operation.

    ``kind``: "samples", "batch", "sample", "output", "loss", "gradient", "parameter", "buffer", "generator", or
    "operation". ``inputs`` and ``random`` are those of an operation: digests of its inputs, and whether it draws.
    """

    kind: str
    name: str
    digests: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    random: bool = False


class Trace(NamedTuple):
    """The entries of a run's steps, in order; the first list is from before the first step.

    ``facts``: the device, the data set and the loader's number of workers; ``error``: how the run failed; ``warned``:
    operations of which torch has no deterministic version, if the run asks for it.
    """

    steps: list[list[Entry]]
    facts: Mapping[str, Any]
    error: str = ""
    warned: tuple[str, ...] = ()


def trace_steps(trainer: type[DefaultTrainer], cfg: CfgNode, steps: int, operations: bool = False) -> Trace:
    """Train for some steps, and return what happened in them.

    Args:
        trainer: the class of the trainer.
        cfg: its config, with a seed, and a folder for a log. Writers, checkpoints and evaluations are left out.
        steps: number of steps.
        operations: record each operation of torch in place of the values of modules. Slow.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.LOG.WRITERS, cfg.LOG.PROGRESS_BAR, cfg.LOG.CURVES, cfg.LOG.LEVEL = (), False, False, "ERROR"
    cfg.TEST.SANITY_CHECK_BATCHES, cfg.TEST.EVAL_ON_START, cfg.FAST_DEV_RUN = 0, False, 0
    with console_kept(), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=".*deterministic")
        default_setup(cfg)
        set_console_level("CRITICAL")  # an error is part of the trace
        one = trainer(cfg)
        one.resume_or_load(resume=False)
        for hook in _LEFT_OUT:
            one.remove_hook(hook)
        whole = cfg.SOLVER.COMPILE_STEP or cfg.SOLVER.CUDA_GRAPH
        tracer = OperationTracer(steps) if operations else WholeStepTracer(steps) if whole else StepTracer(steps)
        tracer.uses_indices = not reason_without_indices(one.data_loader)
        one.register_hooks([tracer])
        error = ""
        try:
            one.train()
        except Exception as failure:
            notes = [note for note in getattr(failure, "__notes__", ()) if "hookline" not in note]
            error = "; ".join([f"{type(failure).__name__}: {failure}", *notes])
        parts = (str(warning.message).partition(NO_VERSION) for warning in caught)
        warned = {name.split()[-1] for name, found, _ in parts if found}
        return Trace(tracer.steps, _facts(one), error, tuple(sorted(warned)))


def _facts(trainer: Any) -> dict[str, Any]:
    loader = trainer.data_loader
    dataset = getattr(loader, "dataset", None)
    device = next((one.device for one in trainer.model.parameters()), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": f"the CPU (threads: {torch.get_num_threads()})" if device.type == "cpu" else name,
        "dataset": type(dataset if dataset is not None else loader).__name__,
        "declared": dataset is not None and is_deterministic(dataset),
        "splits_itself": bool(getattr(dataset, "shares_itself_out", False)),
        "workers": getattr(loader, "num_workers", None),
    }


class WholeStepTracer(HookBase):
    """Records batches, parameters and generators: what can be seen of steps that run as one unit."""

    def __init__(self, steps: int) -> None:
        self.steps: list[list[Entry]] = []
        self._end = steps
        self._now: list[tuple[str, str, torch.Tensor]] = []

    def before_train(self) -> None:
        self._note_state()
        self._finish()

    def after_fetch(self, batch: Any) -> None:
        indices = list(map(int, self.trainer.sample_indices)) if self.uses_indices else []
        if indices:
            self._note("samples", " ".join(map(str, indices)), indices)
        self._note("batch", "", batch)
        if len(indices) == samples_in(batch):
            for number, index in enumerate(indices):
                self._note("sample", str(index), _row(batch, number, len(indices)))

    def after_step(self) -> None:
        self._note_state()
        self._finish()
        if len(self.steps) > self._end:
            self.trainer.request_stop("all steps are traced", exit_code=EXIT_AGAIN)

    def on_exception(self, error: BaseException) -> None:
        self._finish()

    def _note(self, kind: str, name: str, value: Any) -> None:
        self._now.append((kind, name, digest(value)))

    def _note_state(self) -> None:
        model = unwrap_model(self.trainer.model)
        for name, parameter in model.named_parameters():
            self._note("parameter", name, parameter)
        for name, buffer in model.named_buffers():
            self._note("buffer", name, buffer)
        for name, state in capture_rng().items():
            self._note("generator", name, state)

    def _finish(self) -> None:
        self.steps.append([Entry(kind, name, (int(value),)) for kind, name, value in self._now])
        self._now = []


class StepTracer(WholeStepTracer):
    """Records also the outputs of modules, losses and gradients."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self._calls: dict[str, int] = {}

    def before_train(self) -> None:
        super().before_train()
        compiled: list[str] = []
        model = self.trainer.model
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        for name, module in model.named_modules():
            if any(name.startswith(outer) for outer in compiled):
                continue  # a hook would change what is compiled
            see = self._watch(name, type(unwrap_model(module)).__name__)
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                compiled.append(f"{name}." if name else "")
                see = torch.compiler.disable(see)
            module.register_forward_hook(see)

    def _watch(self, name: str, kind: str) -> Any:
        def see(module: Any, inputs: Any, output: Any) -> None:
            self._calls.setdefault(name, len(self._calls))
            self._note("output", f"{name} ({kind})" if name else f"the model ({kind})", output)

        return see

    def after_forward(self, batch: Any, outputs: Any) -> None:
        for name, loss in outputs.items():
            self._note("loss", name, loss)

    def after_backward(self) -> None:
        # In the order of the backward pass, since each gradient follows from those of later modules.
        last = {name: self._calls.get(name.rpartition(".")[0], -1) for name, _ in self._parameters()}
        for name, parameter in sorted(self._parameters(), key=lambda item: -last[item[0]]):
            if parameter.grad is not None:
                self._note("gradient", name, parameter.grad)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(unwrap_model(self.trainer.model).named_parameters())


class OperationTracer(HookBase):
    """Records the operations of torch in each step, forward and backward."""

    def __init__(self, steps: int) -> None:
        self.steps: list[list[Entry]] = [[]]
        self._end = steps
        self._mode: _Operations | None = None

    def before_step(self) -> None:
        self._mode = _Operations()
        self._mode.modules.__enter__()
        self._mode.__enter__()

    def after_step(self) -> None:
        self._leave()
        if len(self.steps) > self._end:
            self.trainer.request_stop("all steps are traced", exit_code=EXIT_AGAIN)

    def on_exception(self, error: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode.modules.__exit__(None, None, None)
            self.steps.append(self._mode.entries())
            self._mode = None


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.modules = ModuleTracker()
        self._seen: list[tuple[str, list[torch.Tensor], list[torch.Tensor], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        in_place = func._schema.is_mutable
        given = args[1:] if random and in_place else args  # a random fill does not depend on the old content
        # These operations return memory for their backward pass, of which parts are not initialized.
        private = any(word in str(func) for word in ("cudnn", "mkldnn", "miopen"))

        def digests(values: Any, kinds: Any) -> list[torch.Tensor]:
            leaves = [one for one in tree_leaves(values) if isinstance(one, kinds)]
            return [digest(one) for one in leaves if not (private and getattr(one, "dtype", None) is torch.uint8)]

        inputs = digests((given, {**kwargs, "out": None}), (torch.Tensor, bool, int, float, complex, str))
        results = func(*args, **kwargs)
        outputs = digests((results, args, kwargs) if in_place else results, torch.Tensor)
        self._seen.append((self._name(func), outputs, inputs, random))
        return results

    def _name(self, func: Any) -> str:
        inner = max(self.modules.parents - {"Global"}, key=lambda name: (name.count("."), name), default="")
        where = f" in {inner.partition('.')[2] or inner}" if inner else ""
        return f"{func}{where}{' (backward pass)' if self.modules.is_bw else ''}"

    def entries(self) -> list[Entry]:
        return [
            Entry("operation", name, tuple(map(int, outputs)), tuple(map(int, inputs)), random)
            for name, outputs, inputs, random in self._seen
        ]


def _row(batch: Any, number: int, size: int) -> Any:
    """Return what a batch has of one sample."""

    def pick(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part[number] if part.dim() and len(part) == size else None
        plain = isinstance(part, list | tuple) and len(part) == size
        return part[number] if plain and not any(isinstance(one, torch.Tensor) for one in part) else None

    return convert(batch, pick)
