"""The function of ``detectron2.utils.collect_env``."""

import importlib
import os
import sys

import torch

__all__ = ["collect_env_info"]

_PACKAGES = ("numpy", "hookline", "torch", "torchvision", "fvcore", "iopath", "PIL", "cv2")


def collect_env_info() -> str:
    """Return a table of the environment: versions, devices, how torch was built."""
    rows = {"sys.platform": sys.platform, "Python": sys.version.replace("\n", "")}
    rows |= {name: _version(name) for name in _PACKAGES}
    rows["GPU available"] = str(torch.cuda.is_available())
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        rows[f"GPU {index}"] = f"{torch.cuda.get_device_name(index)} (arch={major}.{minor})"
    if torch.cuda.is_available():
        rows["CUDA"] = str(torch.version.cuda)
    rows |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(("CUDA_", "NCCL_", "TORCH_"))}
    width = max(map(len, rows))
    table = "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
    return f"{table}\n{torch.__config__.show()}"


def _version(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return "not found"
    folder = os.path.dirname(getattr(module, "__file__", None) or "")
    return f"{getattr(module, '__version__', 'unknown version')} @{folder}"
