"""Find the largest batch that fits into memory."""

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    to about 6 %. Model, optimizer, data and random generators are as before afterwards. Hooks are not called, and
    nothing is written.

    Args:
        trainer: a DefaultTrainer that is not training, in one process.
        memory: on the CPU: how much the process may use, as bytes or "4GB". On a GPU the limit is its memory.
        most: the largest size to try. Default: the number of samples.
        steps: steps with each size. The first creates the optimizer's state, so at least 2.

    Raises:
        ConfigError: not even one sample fits, memory is not given on the CPU, or the trainer has no config or several
            processes.
    """
    if getattr(trainer, "cfg", None) is None:
        raise ConfigError(f"find_batch_size: {type(trainer).__name__} has no config to build a loader from")
    if comm.get_world_size() > 1:
        raise ConfigError("find_batch_size: use one process; multiply the result by the number of ranks")
    on_cpu = trainer._device_type() == "cpu"
    if (memory is not None) != on_cpu:
        raise ConfigError("find_batch_size: memory (--memory 4GB) is for the CPU, and is needed there")
    try:
        samples = len(trainer.data_loader.dataset)
    except (AttributeError, TypeError):
        samples = 2**20
    most = min(samples, 2**20 if most is None else most)
    if memory is None:
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


def parse_memory(memory: int | str) -> int:
    """Return a number of bytes from ``"4GB"``, ``"500M"`` or an int.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)(?:i?B)?\s*", str(memory), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"{memory!r} is not an amount of memory; write bytes, '500MB' or '4GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@contextmanager
def _address_space(memory: int, extra: int) -> Iterator[None]:
    """Limit the memory that this process can allocate to ``memory`` bytes, and ``extra`` for what is kept."""
    try:
        import resource

        pages = Path("/proc/self/statm").read_text().split()
    except (ImportError, OSError) as error:
        raise ConfigError("find_batch_size: memory can be limited on Linux only") from error
    virtual, resident = (int(number) * resource.getpagesize() for number in pages[:2])
    if memory <= resident:
        raise ConfigError(f"find_batch_size: the process uses {resident / 2**20:.0f} MB already; allow it more memory")
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = virtual + memory - resident + extra
    resource.setrlimit(resource.RLIMIT_AS, (min(limit, before[1]) if before[1] > 0 else limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
