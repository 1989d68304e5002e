"""Layers, rooms and circles, read from the imports themselves."""

import ast
import json
import re
import sys
from collections import Counter, defaultdict

import pytest
import rooms
from ranks import complete

LAYERS = ("config", "hooks", "engine")


@pytest.fixture(scope="module")
def imports():
    return rooms.imports()


def layer(module):
    return LAYERS.index(module.split(".")[1])


def test_imports_go_downwards_only(imports):
    arrows = [(module, target) for module, targets in imports.items() for target in targets]
    assert [(module, target) for module, target in arrows if layer(target) > layer(module)] == []


def test_runs_and_command_line_import_config_only_and_no_layer_imports_the_command():
    folder = rooms.ROOT / "src/hookline"
    for path in [folder / "command_line.py", *(folder / "runs").glob("*.py")]:
        for module in re.findall(r"^\s*(?:from|import) (\.\.\S*|hookline\S*)", path.read_text(), re.MULTILINE):
            assert module.startswith(("..config", "hookline.config")), f"{path.name} imports {module}"
    for path in rooms.modules().values():
        assert not re.search(r"^\s*(from|import) \S*\bcli\b", path.read_text(), re.MULTILINE), path


def test_neither_files_nor_rooms_import_each_other_in_a_circle(imports):
    assert rooms.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert not rooms.circles(imports)
    assert not rooms.circles(rooms.room_arrows())


def test_there_are_few_rooms():
    folders = {
        path.parent
        for top in ("config", "hooks", "engine", "src", "tools")
        for path in (rooms.ROOT / top).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert len(folders) <= 20  # fewer, not more


def code_lines(path):
    """The number of lines without blank ones, comments and docstrings."""
    text = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in docstrings and not re.match(r"\s*(#|$)", line) for number, line in lines)


def test_the_files_of_the_trainers_classes_and_of_a_run_stay_small():
    lines = sum(map(code_lines, (rooms.ROOT / "engine").glob("*.py")))
    assert lines <= 2000, f"{lines} lines of code in the files at the root of engine/: take away before you add"


# Writes which functions of the project a default run enters, by file; for each of its jobs how many functions and files
# that are, and how often control goes from one file to another; and the number of attributes of a trainer.
WALK = """
import json, os, sys, threading
from collections import defaultdict

import torch

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, HookBase, default_setup

torch.set_num_threads(1)
root, config, out = os.path.join(sys.argv[1], ""), *sys.argv[2:]
job, calls = "", defaultdict(list)


def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and code.co_name != "<module>":
        calls[job].append((code.co_filename.removeprefix(root), code.co_qualname))


class Mark(HookBase):
    def before_step(self):
        global job
        job = "step" if self.trainer.iter == 6 else ""


def run(resume, length):
    global job
    cfg = get_cfg()
    cfg.merge_from_file(config)
    keys = {"OUTPUT_DIR": out, "SOLVER.MAX_ITER": length, "SOLVER.CHECKPOINT_PERIOD": 0, "LOG.PERIOD": 1000,
            "MODEL.DEVICE": "cpu", "DATALOADER.NUM_WORKERS": 0, "LOG.WRITERS": "['JSONWriter']"}
    cfg.merge_from_list([part for pair in keys.items() for part in pair])
    sys.setprofile(note)
    threading.setprofile(note)
    job = "" if resume else "start"
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Mark()])
    job = "resume" if resume else "start"
    trainer.resume_or_load(resume=resume)
    job = "" if resume else "start"
    trainer.train()
    job = ""
    return trainer


run(False, 12)
trainer = run(True, 16)
job = "save"
trainer.find_hook("PeriodicCheckpointer").save("model_x", iteration=3)
sys.setprofile(None)
entered = sorted({call for part in calls.values() for call in part})
del calls[""]
walk = {"attributes": [len(vars(trainer))]}
for name, part in calls.items():
    files = [file for file, _ in part]
    walk[name] = [len(set(part)), len(set(files)), sum(a != b for a, b in zip(files, files[1:]))]
with open(os.path.join(out, "walk.json"), "w") as file:
    json.dump([walk, entered], file)
"""


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """What ``WALK`` writes."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "walk.py").write_text(WALK)
    config = rooms.ROOT / "configs/synthetic/mlp.yaml"
    complete([sys.executable, folder / "walk.py", rooms.ROOT, config, folder / "run"], folder)
    return json.loads((folder / "run/walk.json").read_text())


# Functions, files, and changes of the file, at most. They only fall.
LIMITS = {
    "start": (422, 65, 1247),
    "step": (43, 19, 40),
    "save": (88, 23, 71),
    "resume": (137, 34, 125),
    "attributes": (35,),
}


def test_a_reader_does_not_walk_further_than_before(default_run):
    walk, _ = default_run
    for job, limits in LIMITS.items():
        assert all(there <= most for there, most in zip(walk[job], limits, strict=True)), (job, walk[job], limits)


def test_no_class_is_changed_at_run_time():
    """But for tensors that a pickle describes."""
    names = {"__class__", "__bases__", "__dict__"}
    for path in rooms.modules().values():
        if path.parent.name == "checkpoint":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                set_here = {
                    getattr(one, "attr", "") for target in node.targets for one in getattr(target, "elts", [target])
                }
                assert not names & set_here, f"{path}, line {node.lineno}"


def functions(path):
    """The number of lines of each function of a file, by qualified name."""
    lines = Counter()

    def add(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                lines[prefix + child.name] += child.end_lineno - child.lineno + 1
            elif isinstance(child, ast.ClassDef):
                add(child, f"{prefix}{child.name}.")

    add(ast.parse(path.read_text()), "")
    return lines


def test_the_core_path_is_what_a_run_passes_through(default_run):
    core = re.findall(r"^\d\. \[(\S+/\S+\.py)\]", (rooms.ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(core) == 6
    lines = sum(len((rooms.ROOT / path).read_text().splitlines()) for path in core)
    assert lines <= 2215, f"{lines} lines: take away, or move what a default run does not use into its room"

    entered, seen = defaultdict(set), {}
    for path, name in default_run[1]:
        entered[path].add(name)
    for path in entered.keys() & {str(file.relative_to(rooms.ROOT)) for file in rooms.modules().values()}:
        all_lines = functions(rooms.ROOT / path)
        seen[path] = sum(number for name, number in all_lines.items() if name in entered[path])
        if path in core:
            share = seen[path] / all_lines.total()
            assert share >= 0.7, f"a default run enters only {share:.0%} of the functions in {path}"
    others = sorted((number for path, number in seen.items() if path not in core), reverse=True)
    # With a tenth of slack: files beside the core grow and shrink by a few lines.
    assert sum(seen[path] for path in core) > 0.9 * sum(others[: len(core)]), "six other files explain more of a run"


def test_private_attributes_of_a_trainer_are_used_in_its_own_files_only():
    owners = {f"engine/{name}.py" for name in ("train_loop", "simple_trainer", "defaults", "trainer")}
    for path in rooms.modules().values():
        if str(path.relative_to(rooms.ROOT)) not in owners:
            found = re.findall(r"trainer\._[a-z]\w*", path.read_text())
            assert not found, f"{path} uses {found}"
