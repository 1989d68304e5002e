"""Find the largest batch that fits into memory."""

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ...config import ConfigError
from .. import comm
from .probe import probing

__all__ = ["find_batch_size", "parse_memory"]

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED", "could not create a memory")


def find_batch_size(trainer: Any, memory: int | str | None = None, most: int | None = None, steps: int = 2) -> int:
    """Return the largest ``DATALOADER.BATCH_SIZE`` whose steps fit into memory.

    Sizes are tried from ``DATALOADER.BATCH_SIZE`` on: doubled until a step runs out of memory, then halved in between,
    to about 6 %. Model, optimizer, data and
    random generators are as before afterwards. Hooks are not called, and nothing is written.

    Args:
        trainer: a DefaultTrainer that is not training, in one process.
        memory: on the CPU: how much the process may use, as bytes or "4GB". Default: what is free now. On a GPU the
            limit is its memory.
        most: the largest size to try. Default: the number of samples.
        steps: steps with each size. The first creates the optimizer's state, so at least 2.

    Raises:
        ConfigError: not even one sample fits, or the trainer has no config or several processes.
    """
    if getattr(trainer, "cfg", None) is None:
        raise ConfigError(f"find_batch_size: {type(trainer).__name__} has no config to build a loader from")
    if comm.get_world_size() > 1:
        raise ConfigError("find_batch_size: use one process; multiply the result by the number of ranks")
    on_cpu = trainer._device_type() == "cpu"
    if memory is not None and not on_cpu:
        raise ConfigError("find_batch_size: memory is for the CPU; on a GPU its own memory is the limit")
    samples = _number_of_samples(trainer.data_loader)
    most = min(size for size in (most, samples, 2**20) if size is not None)
    if not on_cpu:
        return _search(trainer, most, steps)
    model = [*trainer.model.parameters(), *trainer.model.buffers()]
    with _address_space(parse_memory(memory), extra=sum(tensor.nbytes for tensor in model)):
        return _search(trainer, most, steps)


def _search(trainer: Any, most: int, steps: int) -> int:
    fits, fails = 0, most + 1
    size = min(trainer.cfg.DATALOADER.BATCH_SIZE, most)
    while fails - fits > max(1, fits // 16):
        if _fits(trainer, size, steps):
            fits = size
        else:
            fails = size
        size = min(2 * fits, most) if fails == most + 1 else (fits + fails) // 2
        size = max(size, 1)
    if not fits:
        raise ConfigError("find_batch_size: not even a batch of one sample fits into memory")
    return fits


def _fits(trainer: Any, size: int, steps: int) -> bool:
    cfg = trainer.cfg.clone()
    cfg.defrost()
    cfg.DATALOADER.BATCH_SIZE, cfg.DATALOADER.DROP_LAST = size, True
    failed = ""
    with probing(trainer, trainer.build_train_loader(cfg)) as probe:
        try:
            probe._train(0, steps)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            failed = str(error).partition("\n")[0] or type(error).__name__  # MemoryError() has no text
    del probe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    logger.info("A batch of %d samples %s", size, f"does not fit: {failed}" if failed else "fits")
    return not failed


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(part in str(error) for part in _OUT_OF_MEMORY)


def parse_memory(memory: int | str | None) -> int | None:
    """Return a number of bytes from ``"4GB"``, ``"500M"`` or an int.

    Raises:
        ConfigError: it is none of these.
    """
    if memory is None or (isinstance(memory, int) and not isinstance(memory, bool) and memory > 0):
        return memory
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)(?:i?B)?\s*", str(memory), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"{memory!r} is not an amount of memory; write bytes, '500MB' or '4GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@contextmanager
def _address_space(memory: int | None, extra: int) -> Iterator[None]:
    """Limit the memory that this process can allocate, to ``memory`` or to what is free now.

    Args:
        memory: bytes.
        extra: bytes for the copy that restores the model.
    """
    try:
        import resource

        status = Path("/proc/self/status").read_text()
    except (ImportError, OSError) as error:
        raise ConfigError("find_batch_size: memory can be limited on Linux only") from error
    virtual, resident = _kilobytes(status, "VmSize"), _kilobytes(status, "VmRSS")
    budget = available_memory() if memory is None else memory - resident
    if budget <= 0:
        raise ConfigError(f"find_batch_size: the process uses {resident / 2**20:.0f} MB already; allow it more memory")
    before = resource.getrlimit(resource.RLIMIT_AS)
    new = virtual + budget + extra
    if before[1] != resource.RLIM_INFINITY:
        new = min(new, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (new, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def available_memory() -> int:
    """Return the free memory of the machine, or of the container if that is less, in bytes.

    Raises:
        OSError: it is known on Linux only.
    """
    free = _kilobytes(Path("/proc/meminfo").read_text(), "MemAvailable")
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no limit
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def _kilobytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _number_of_samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
