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


def readme() -> str:
    """Return README.md for a package index: links to files lead to the repository, or become text without one.

    Pictures come from the repository, or are left out.
    """

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if "://" in target:
            return match[0]
        if picture:
            return f"![{text}]({REPOSITORY}/raw/v{VERSION}/{target})" if REPOSITORY else ""
        path = target if not target.startswith("#") else f"README.md{target}"
        return f"[{text}]({REPOSITORY}/blob/v{VERSION}/{path})" if REPOSITORY else text

    return re.sub(r"(!?)\[([^\]\n]+)\]\(([^)\s]+)\)", link, (ROOT / "README.md").read_text())


setup(
    version=VERSION,
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=packages,
    package_dir={"hookline": "src/hookline", **{f"hookline.{folder}": folder for folder in FOLDERS}},
    zip_safe=False,
)
