"""Maps the top-level folders config/, hooks/, engine/ and configs/ to hookline.config and so on."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "src/hookline/__init__.py").read_text())[1]
FOLDERS = ("config", "hooks", "engine", "configs")

packages = ["hookline", "hookline.detectron2"]
for folder in FOLDERS:
    packages.append(f"hookline.{folder}")
    packages += [
        f"hookline.{folder}.{name}" for name in find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__"])
    ]

EXTRAS = {
    "digits": ["scikit-learn>=1.3"],
    "lazy": ["omegaconf>=2.3"],
    "huggingface": ["datasets>=2.19", "transformers>=4.40"],
    "images": ["pillow>=10"],
    "metrics": ["torchmetrics>=1.4"],
    "plot": ["matplotlib>=3.7"],
    "rich": ["rich>=13.4"],
    "safetensors": ["safetensors>=0.4"],
    "tables": ["pyarrow>=14"],
}
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})
EXTRAS["docs"] = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]
EXTRAS["dev"] = [
    *EXTRAS["all"],
    *EXTRAS["docs"],
    *("build", "jsonschema", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "torchdata", "types-PyYAML"),
]

setup(
    name="hookline",
    version=VERSION,
    description="A training engine for PyTorch: one loop, with hooks along it",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages,
    package_dir={"hookline": "src/hookline", **{f"hookline.{folder}": folder for folder in FOLDERS}},
    package_data={
        "hookline": ["py.typed"],
        "hookline.config": ["*.pyi", "schema/*.json"],
        "hookline.configs": ["*.yaml", "*/*.yaml"],
    },
    install_requires=[
        "torch>=2.6",
        "fvcore>=0.1.5.post20221221",
        "yacs>=0.1.8",
        "iopath>=0.1.9",
        "tensorboard>=2.15",
        "numpy>=1.26",
    ],
    extras_require=EXTRAS,
    zip_safe=False,
)
