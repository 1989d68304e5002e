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


SCRIPT = """
import sys
from importlib.util import find_spec
from pathlib import Path

import hookline
from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, default_setup

REPOSITORY, PLACE = map(Path, sys.argv[1:3])
assert PLACE in Path(hookline.__file__).resolve().parents, hookline.__file__
assert not any(Path(folder or ".").resolve() == REPOSITORY for folder in sys.path), sys.path
assert not [name for name in ("config", "hooks", "engine", "tools", "tests", "configs") if find_spec(name)]
for name in sys.argv[3:]:
    assert find_spec(name), name
cfg = get_cfg()
cfg.merge_from_list(["MODEL.NAME", "MLP", "MODEL.ARGS", {"in_features": 8, "num_classes": 4}, "OUTPUT_DIR", "run"])
cfg.merge_from_list(["MODEL.LOSS.NAME", "CrossEntropyLoss", "DATASETS.TRAIN", ("synthetic",)])
cfg.merge_from_list(["DATASETS.TEST", ("synthetic",), "TEST.METRICS", ("Accuracy",), "SOLVER.MAX_ITER", "5ep"])
cfg.merge_from_list(["SOLVER.BASE_LR", 0.1, "SOLVER.WARMUP_ITERS", 5, "SEED", 0])
default_setup(cfg, None)
result = DefaultTrainer(cfg).train()
assert result.reason == "completed", result
assert result.metrics["synthetic/accuracy"] > 0.8, result
assert all(Path("run", name).exists() for name in ("config.yaml", "metrics.json", "model_final.pth"))
print("trained")
"""


def check_use(python: str, place: Path, folder: Path, *modules: str) -> None:
    """Train with a user's script, from a folder of the user's."""
    folder.mkdir()
    (folder / "my_script.py").write_text(SCRIPT)
    done = run_python(["my_script.py", str(ROOT), str(place), *modules], folder, python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained" in done.stdout


def test_the_wheel_trains_without_the_repository_in_a_folder_of_the_users(wheel, tmp_path):
    python = environment(tmp_path / "venv")
    install(python, str(wheel))
    folder = tmp_path / "elsewhere"
    check_use(python, tmp_path / "venv", folder)

    def run(*words, place=folder):
        done = run_python([*words], place, python)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    hookline = str(Path(python).with_name("hookline"))
    run(hookline, "new", "my_project")
    assert "1 passed" in run("-m", "pytest", place=folder / "my_project")
    example = ("--config-file", "gan/rings.yaml")  # which has Python code beside it
    out = run(hookline, "train", *example, "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "5")
    assert str(tmp_path / "venv") in out.split("Config file: ")[1].splitlines()[0]


def test_an_editable_install_trains_from_elsewhere_and_sees_changes(tree, tmp_path):
    python = environment(tmp_path / "venv")
    copy = shutil.copytree(tree, tmp_path / "checkout")
    install(python, "--no-build-isolation", "-e", str(copy))
    (copy / "hooks" / "brand_new.py").touch()
    check_use(python, copy, tmp_path / "elsewhere", "hookline.hooks.brand_new")
