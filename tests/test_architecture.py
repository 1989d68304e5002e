"""Layers, rooms and circles, read from the imports themselves."""

import re

import rooms

LAYERS = ("config", "hooks", "engine")


def layer(module):
    return LAYERS.index(module.split(".")[1])


def test_imports_go_downwards_only():
    upwards = [
        (module, target)
        for module, targets in rooms.imports().items()
        for target in targets
        if layer(target) > layer(module)
    ]
    assert not upwards


def test_what_the_layers_use_beside_them_imports_config_only():
    folder = rooms.ROOT / "src/hookline"
    for path in [folder / "command_line.py", *(folder / "runs").glob("*.py")]:
        for module in re.findall(r"^\s*(?:from|import) (\.\.\S*|hookline\S*)", path.read_text(), re.MULTILINE):
            assert module.startswith(("..config", "hookline.config")), f"{path.name} imports {module}"


def test_the_layers_do_not_import_the_command():
    for layer in LAYERS:
        for path in (rooms.ROOT / layer).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) \S*\bcli\b", path.read_text(), re.MULTILINE), path


def test_no_files_import_each_other_in_a_circle():
    assert not rooms.circles(rooms.imports())


def test_no_rooms_import_each_other_in_a_circle():
    assert not rooms.circles(rooms.room_arrows())


def test_a_circle_would_be_found():
    assert rooms.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


def test_every_room_has_a_docstring():
    for name, path in rooms.modules().items():
        if path.name == "__init__.py":
            assert path.read_text().startswith('"""'), name


def test_the_table_of_imports_leaves_out_what_follows_from_others():
    assert "| `engine/launch.py` | `engine/ranks` |" in rooms.table()


def test_the_docs_name_a_short_core_path():
    text = rooms.PAGE.read_text()
    core = [
        line.split("`")[1]
        for line in text.splitlines()
        if line.startswith("| `") and line.split("`")[1].endswith(".py") and "/" in line.split("`")[1]
    ]
    assert len(core) == 8
    lines = sum(len((rooms.ROOT / path).read_text().splitlines()) for path in core)
    assert lines <= 3450, f"{lines} lines: move what a first reader does not need into its room"
