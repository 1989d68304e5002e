"""Maps the top-level folders config/, hooks/, engine/ and configs/ to hookline.config and so on."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
# Where the project is published, such as a repository on GitHub. Empty: not yet, and links to files are left out.
REPOSITORY = ""
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "src/hookline/__init__.py").read_text())[1]
FOLDERS = ("config", "hooks", "engine", "configs")

packages = ["hookline", *(f"hookline.{name}" for name in ("cli", "detectron2", "runs"))]
for folder in FOLDERS:
    packages.append(f"hookline.{folder}")
    packages += [
        f"hookline.{folder}.{name}" for name in find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__"])
    ]

EXTRAS = {
    "digits": ["scikit-learn>=1.3"],
    "lazy": ["omegaconf>=2.3"],
    "huggingface": ["datasets>=2.19", "transformers>=4.40"],
    "images": ["pillow>=10.1"],
    "onnx": ["onnx>=1.17", "onnxscript>=0.3", "onnxruntime>=1.20"],
    "peft": ["peft>=0.13"],
    "metrics": ["torchmetrics>=1.4"],
    "notebook": ["ipykernel>=6", "ipywidgets>=8", "matplotlib>=3.7", "pandas>=2"],
    "plot": ["matplotlib>=3.7"],
    "mlflow": ["mlflow>=2.14", "pillow>=10"],
    "safetensors": ["safetensors>=0.4"],
    "wandb": ["wandb>=0.17", "pillow>=10"],
}
EXTRAS["all"] = sorted({name for names in EXTRAS.values() for name in names})
EXTRAS["docs"] = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]
EXTRAS["dev"] = [
    *(name for name in EXTRAS["all"] if not name.startswith(("mlflow", "peft"))),
    # What the tests need of mlflow, a third of its size.
    *("mlflow-skinny>=2.14", "sqlalchemy", "alembic"),
    *EXTRAS["docs"],
    *(
        "build",
        "mypy",
        "nbclient",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "readme-renderer[md]",
        "ruff",
        "torchdata",
        "types-PyYAML",
    ),
]


def readme() -> str:
    """Return README.md for a package index: links to files lead to the repository, or become text without one."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target:
            return match[0]
        path = target if not target.startswith("#") else f"README.md{target}"
        return f"[{text}]({REPOSITORY}/blob/v{VERSION}/{path})" if REPOSITORY else text

    return re.sub(r"\[([^\]\n]+)\]\(([^)\s]+)\)", link, (ROOT / "README.md").read_text())


setup(
    name="hookline",
    version=VERSION,
    description="A training engine for PyTorch: one loop, with hooks along it",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pytorch", "training", "trainer", "hooks", "callbacks", "checkpoints", "detectron2"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={"Source": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md"} if REPOSITORY else {},
    python_requires=">=3.11",
    packages=packages,
    package_dir={"hookline": "src/hookline", **{f"hookline.{folder}": folder for folder in FOLDERS}},
    package_data={
        "hookline": ["py.typed"],
        "hookline.cli": ["project/*"],
        "hookline.configs": ["*.yaml", "*/*.yaml"],
    },
    install_requires=[
        "torch>=2.6",
        "fvcore>=0.1.5.post20221221",
        "yacs>=0.1.8",
        "iopath>=0.1.9",
        "PyYAML>=6",
        "tensorboard>=2.15",
        "numpy>=1.26",
        "tqdm>=4.60",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hookline = hookline.cli:main"]},
    zip_safe=False,
)
