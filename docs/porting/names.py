"""Writes the tables of names in docs/porting/detectron2.md, from src/hookline/detectron2/names.py.

python docs/porting/names.py
"""

from pathlib import Path

from hookline.detectron2.names import HOMES, REFUSED, homes_of

PAGE = Path(__file__).parent / "detectron2.md"
BEGIN, END = "<!-- {}: made by docs/porting/names.py -->\n", "<!-- end of {} -->\n"


def table() -> str:
    """Return the rows: a module of detectron2, the modules of hookline, and their names."""
    lines = ["| detectron2 | hookline | names |", "|---|---|---|"]
    for module in HOMES:
        homes: dict[str, list[str]] = {}
        for old, (home, new) in sorted(homes_of(module).items()):
            homes.setdefault(home, []).append(f"`{old}`" if old == new else f"`{old}` (here `{new}`)")
        lines += [f"| `{module}` | `{home}` | {', '.join(names)} |" for home, names in homes.items()]
    return "\n".join(lines) + "\n"


def refused() -> str:
    """Return the rows: modules and names of detectron2, and why they are not here."""
    names: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        names.setdefault(reason, []).append(f"`{name.removeprefix('detectron2.')}`")
    rows = [f"| {', '.join(those)} | {reason} |" for reason, those in names.items()]
    return "\n".join(["| of detectron2 | why it is not in hookline |", "|---|---|", *rows]) + "\n"


TABLES = {"names": table, "refused": refused}


def with_tables(text: str) -> str:
    """Return a page with its tables rewritten."""
    for name, rows in TABLES.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        text = before + begin + rows() + END.format(name) + rest.partition(END.format(name))[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
