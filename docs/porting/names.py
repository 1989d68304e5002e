"""Writes the table of detectron2's modules in docs/porting/detectron2.md, from src/hookline/detectron2/names.py.

python docs/porting/names.py
"""

from pathlib import Path

from hookline.detectron2.names import HOMES, homes_of

PAGE = Path(__file__).parent / "detectron2.md"
BEGIN, END = "<!-- names: made by docs/porting/names.py -->\n", "<!-- end of names -->\n"


def table() -> str:
    """Return the rows: a module of detectron2, the modules of hookline, and their names."""
    lines = ["| detectron2 | hookline | names |", "|---|---|---|"]
    for module in HOMES:
        homes: dict[str, list[str]] = {}
        for old, (home, new) in sorted(homes_of(module).items()):
            homes.setdefault(home, []).append(f"`{old}`" if old == new else f"`{old}` (here `{new}`)")
        lines += [f"| `{module}` | `{home}` | {', '.join(names)} |" for home, names in homes.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the table."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
