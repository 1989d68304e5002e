"""Finds the modules of detectron2 in hookline: an import hook."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GUIDE = "docs/porting/detectron2.md"

MODULES = """
    detectron2 detectron2.checkpoint detectron2.checkpoint.detection_checkpoint
    detectron2.config detectron2.config.config detectron2.config.defaults detectron2.config.instantiate
    detectron2.config.lazy detectron2.data detectron2.data.build detectron2.data.common detectron2.data.samplers
    detectron2.data.samplers.distributed_sampler detectron2.data.samplers.grouped_batch_sampler
    detectron2.engine detectron2.engine.defaults detectron2.engine.hooks detectron2.engine.launch
    detectron2.engine.train_loop detectron2.evaluation detectron2.evaluation.evaluator detectron2.evaluation.testing
    detectron2.modeling detectron2.modeling.meta_arch detectron2.modeling.meta_arch.build
    detectron2.solver detectron2.solver.build detectron2.solver.lr_scheduler
    detectron2.utils detectron2.utils.analysis detectron2.utils.collect_env detectron2.utils.comm detectron2.utils.env
    detectron2.utils.events detectron2.utils.file_io detectron2.utils.logger detectron2.utils.memory
    detectron2.utils.registry detectron2.utils.serialize
"""
"""The modules of detectron2 0.6 that can be imported."""

HOMES = {
    "detectron2.checkpoint": ("hookline.engine.checkpoint",),
    "detectron2.config": ("hookline.config", "hookline.config.defaults"),
    "detectron2.data": ("hookline.engine.data",),
    "detectron2.engine": ("hookline.engine", "hookline.hooks", "hookline.engine.launch"),
    "detectron2.engine.defaults": (
        "hookline.engine.defaults",
        "hookline.engine",
        "hookline.hooks",
        "hookline.engine.detectron2_names",
    ),
    "detectron2.engine.hooks": ("hookline.hooks",),
    "detectron2.evaluation": ("hookline.engine.evaluation",),
    "detectron2.modeling": ("hookline.engine.modeling",),
    "detectron2.solver": (
        "hookline.engine.solver",
        "hookline.engine.solver.lr_scheduler",
        "hookline.engine.solver.param_groups",
    ),
    "detectron2.utils": ("hookline.engine.setup.utils",),
    "detectron2.utils.analysis": ("fvcore.nn",),
    "detectron2.utils.comm": ("hookline.engine.comm",),
    "detectron2.utils.events": ("hookline.hooks",),
    "detectron2.utils.registry": ("hookline.config",),
}
"""Where the names of a module of detectron2 are, and those of modules in it that have no row."""


INSTEAD = {
    "checkpoint": "hookline.engine.checkpoint",
    "config.downgrade_config": "the keys in docs/config.md",
    "config.upgrade_config": "the keys in docs/config.md",
    "data": "hookline.engine.data: data sets are classes that DATASETS.TRAIN names",
    "data.DatasetCatalog": "DATASET_REGISTRY of hookline.engine.data",
    "data.DatasetMapper": "the data set's __getitem__, or MapDataset",
    "data.MetadataCatalog": "attributes of the data set, such as classes",
    "data.build_detection_test_loader": "build_test_loader of hookline.engine.data",
    "data.build_detection_train_loader": "build_train_loader of hookline.engine.data",
    "data.detection_utils": "torchvision.io",
    "data.get_detection_dataset_dicts": "DATASET_REGISTRY of hookline.engine.data",
    "data.transforms": "torchvision.transforms.v2",
    "engine.launch": "launch of hookline.engine",
    "evaluation": "TEST.METRICS, or your own DatasetEvaluator",
    "export": "export_weights of hookline.engine",
    "layers": "torch.nn or torchvision.ops",
    "model_zoo": "MODEL.NAME, which takes names such as torchvision.models:resnet50, and MODEL.WEIGHTS",
    "modeling": "MODEL.NAME, which takes the name of any class, such as my_package.nets:Net",
    "solver": "hookline.engine.solver",
    "structures": "torchvision.tv_tensors and torchvision.ops",
    "utils.analysis": "fvcore.nn",
    "utils.comm": "hookline.engine.comm",
    "utils.video_visualizer": "torchvision.utils",
    "utils.visualizer": "torchvision.utils, and the hook SamplePredictions",
}
"""What to use for a name or module of detectron2, and all in it, that hookline does not have."""


def install() -> None:
    """Let ``import detectron2`` find hookline, unless detectron2 is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def installed_at() -> str | None:
    """Return where detectron2 itself is, or None. A folder without ``__init__.py`` does not count."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find("detectron2", None) if find and not isinstance(finder, _Finder) else None
        if spec is not None and spec.origin is not None:
            return spec.origin
    return None


def _homes(module: str) -> list[ModuleType]:
    while module and module not in HOMES:
        module = module.rpartition(".")[0]
    return [importlib.import_module(home) for home in HOMES.get(module, ())]


def _public(module: str) -> list[str]:
    return [name for home in _homes(module) for name in getattr(home, "__all__", ())]


def home_of(module: str, name: str) -> ModuleType | None:
    """Return the module of hookline that has a name of a module of detectron2; None if there is none."""
    homes = [] if name.startswith("__") else _homes(module)
    for home in homes:
        if name in getattr(home, "__all__", ()):
            return home
    if f"{module}.{name}" in MODULES.split():
        return None
    return next((home for home in homes if not isinstance(getattr(home, name, sys), ModuleType)), None)


def describe(full: str) -> str:
    """Say why a name of detectron2, such as ``detectron2.structures.Boxes``, is not in hookline."""
    module, _, name = full.rpartition(".")
    there = {*_public(module), *(key.rpartition(".")[2] for key in MODULES.split() if key.rpartition(".")[0] == module)}
    near = difflib.get_close_matches(name, there, 1, 0.8)
    if near:
        return f"{full} is not in hookline; did you mean '{near[0]}'? (see {GUIDE})"
    key = full.removeprefix("detectron2.")
    while key not in INSTEAD and "." in key:
        key = key.rpartition(".")[0]
    # The last part: DatasetCatalog is in detectron2.data and in detectron2.data.catalog.
    use = INSTEAD.get(f"{full.split('.')[1]}.{name}") or INSTEAD.get(key)
    use = f"; use {use}" if use else ", or write it yourself"
    return f"{full} is not in hookline: it is part of detection, or of detectron2's own tools{use} (see {GUIDE})"


class _Finder(Loader):
    """Finds aliases of detectron2's modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "detectron2" and not name.startswith("detectron2."):
            return None
        parent = name.rpartition(".")[0]
        if not isinstance(sys.modules.get(parent), _Alias) if parent else installed_at():
            return None  # detectron2 itself, or a module of it
        if name in MODULES.split():
            return ModuleSpec(name, self, is_package=True)
        # "from module import name" comes here for every name that the module has not
        raise ImportError(describe(name), name=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, f"Names of {spec.name} in hookline.")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(__all__=_public(module.__name__), __version__="0.6")


class _Alias(ModuleType):
    """A module whose names are in other modules. What is set here is set there."""

    def __getattr__(self, name: str) -> Any:
        home, full = home_of(self.__name__, name), f"{self.__name__}.{name}"
        if home is not None:
            return getattr(home, name)
        if full in MODULES.split():
            return importlib.import_module(full)  # detectron2's modules import each other
        raise AttributeError(describe(full), name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        home = None if isinstance(value, _Alias) else home_of(self.__name__, name)
        if home is None:
            super().__setattr__(name, value)
        else:
            setattr(home, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_public(self.__name__)})
