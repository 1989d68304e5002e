"""The package as users get it: built, installed elsewhere, and used from another folder."""

import email
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from readme_renderer import markdown
from snippets import ROOT, run_python

import hookline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository without ignored files."""
    copy = tmp_path_factory.mktemp("tree")
    # The checkout may belong to another user.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """Folder of the sdist, and of the wheel that was built from the sdist."""
    dist = tmp_path_factory.mktemp("dist")
    done = run_python(["-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)], dist)
    assert done.returncode == 0, done.stdout + done.stderr
    return dist


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def modules(folder, package):
    """The files that ``folder`` should become in ``package``."""
    return {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}


def test_the_wheel_and_the_sdist_hold_the_package_and_nothing_else(wheel, built, metadata, tree):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = modules(tree / "src/hookline", "hookline") | {
        "hookline/configs/project/config.yaml",
        "hookline/py.typed",
    }
    for folder in ("config", "hooks", "engine", "configs"):
        expected |= modules(tree / folder, f"hookline/{folder}")
    expected |= {f"hookline/{path.relative_to(tree).as_posix()}" for path in (tree / "configs").rglob("*.yaml")}
    assert names == expected
    assert "hookline/engine/data/build.py" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == hookline.__version__
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml", "engine/data/build.py"} <= names
    assert not {name for name in names if name.startswith(("tests", "output", "build", "docs"))}


def test_the_readme_is_readable_on_an_index(metadata):
    text = metadata.get_payload(decode=True).decode()
    assert "# hookline" in text
    assert markdown.render(text)
    # An index has no other files of the repository, and no anchors.
    assert not [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def test_links_of_the_readme_lead_to_the_repository(tree, tmp_path):
    place = shutil.copytree(tree, tmp_path / "published")
    setup = (place / "setup.py").read_text().replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/hookline"')
    (place / "setup.py").write_text(setup)
    done = run_python(["setup.py", "-q", "--long-description", "--url"], place)
    links = re.findall(r"\]\((https://example.org/[^)]*)\)", done.stdout)
    assert f"https://example.org/hookline/blob/v{hookline.__version__}/config/defaults.py" in links, done.stderr
    for link in links:
        path = re.fullmatch(r"https://example.org/hookline/(?:blob|raw)/v[^/]+/([^#]+).*", link)[1]
        assert (ROOT / path).exists(), link
    assert f"https://example.org/hookline/raw/v{hookline.__version__}/docs/pictures/console.svg" in links


def test_the_requirements_of_the_wheel_are_those_of_the_readme(metadata):
    assert metadata["Requires-Python"] == ">=3.11"
    requires = metadata.get_all("Requires-Dist")
    names = {re.match(r"[\w-]+", line)[0].lower() for line in requires if "extra ==" not in line}
    assert names == {"torch", "numpy", "fvcore", "yacs", "iopath", "pyyaml", "tensorboard", "tqdm"}
    extras = {name.lower() for name in metadata.get_all("Provides-Extra")}
    table = (ROOT / "README.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert extras == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    # Every pinned package is a requirement of the package or of an extra.
    pins = re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert {pin.lower() for pin in pins} - names == {"scikit-learn"}
    assert any(line.startswith("scikit-learn") for line in requires)


def environment(folder: Path) -> str:
    """Return the Python of a virtual environment that sees the packages of this one, except for hookline.

    Folders in a ``.pth`` file are searched, but their own ``.pth`` files, such as that of an editable install, are not
    read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    python = str(folder / "bin" / "python")
    assert "No module named 'hookline'" in run_python(["-c", "import hookline"], folder, python).stderr
    return python


def install(python: str, *what: str) -> None:
    command = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed"]
    done = run_python([*command, *what], Path(python).parent)
    assert done.returncode == 0, done.stdout + done.stderr


def train(python: str, folder: Path) -> str:
    """Train an example with the installed command, in a folder of the user's; return its output."""
    folder.mkdir()
    keys = ("MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "5", "OUTPUT_DIR", "run")
    # It has Python code beside its config.
    done = run_python(["-m", "hookline", "train", "--config-file", "gan/rings.yaml", *keys], folder, python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((folder / "run" / name).exists() for name in ("config.yaml", "metrics.json", "model_final.pth"))
    return done.stdout.split("Config file: ")[1].splitlines()[0]


def test_the_wheel_trains_without_the_repository_in_a_folder_of_the_users(wheel, tmp_path):
    python = environment(tmp_path / "venv")
    install(python, str(wheel))
    folder = tmp_path / "elsewhere"
    assert str(tmp_path / "venv") in train(python, folder)
    for words in (["-m", "hookline", "new", "my_project"], ["-m", "pytest", "my_project"]):
        done = run_python(words, folder, python)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    done = run_python([str(Path(python).with_name("hookline")), "--version"], folder, python)
    assert done.stdout == f"hookline {hookline.__version__}\n"


def test_an_editable_install_trains_from_elsewhere_and_sees_changes(tree, tmp_path):
    python = environment(tmp_path / "venv")
    copy = shutil.copytree(tree, tmp_path / "checkout")
    install(python, "--no-build-isolation", "-e", str(copy))
    (copy / "hooks" / "brand_new.py").touch()
    assert str(copy) in train(python, tmp_path / "elsewhere")
    done = run_python(["-c", "import hookline.hooks.brand_new"], tmp_path, python)
    assert done.returncode == 0, done.stderr
