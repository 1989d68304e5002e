"""Makes docs/pictures/ from real runs: ``python docs/pictures.py``, in a clone with ``pip install -e ".[dev]"``.

Also needs Chromium (Debian's package ``chromium``), and ``pip install rich pexpect nbconvert``.
"""

import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbconvert
import nbformat
import pexpect
from PIL import Image
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).resolve().parent / "pictures"
COLUMNS = 100
DIGITS = """
_BASE_: "digits/convnet.yaml"
TEST: {EVAL_PERIOD: "3ep"}
OUTPUT_DIR: "output/digits"
"""
RATES = ("0.03", "0.003", "0.0003")
CELLS = [
    """
import torch
from torch import nn

from hookline import Trainer
from hookline.hooks import LivePlot

x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
y = (x.norm(dim=1) > 1.2).long()
net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
trainer = Trainer(net, (x[:1500], y[:1500]), (x[1500:], y[1500:]), loss=nn.CrossEntropyLoss(), lr=0.1,
                  metrics=["Accuracy", "Loss"], length="6ep", eval_period="1ep", hooks=[LivePlot()], seed=0)
""",
    "result = trainer.train()",
]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1")
    os.chdir(tempfile.mkdtemp())
    pictures = {"console": console, "sweep": sweep, "notebook": notebook}
    for name in sys.argv[1:] or pictures:
        pictures[name]()
    for picture in sorted(FOLDER.iterdir()):
        print(f"{picture.name}: {picture.stat().st_size / 1000:.0f} kB")


def console() -> None:
    """Record a terminal until two thirds of a run are done."""
    Path("digits.yaml").write_text(DIGITS)
    program, *arguments = hookline("train", "--config-file", "digits.yaml")
    child = pexpect.spawn(program, arguments, dimensions=(40, COLUMNS), encoding="utf-8", timeout=120)
    child.expect(r"epoch \d+/20: +6\d%[^\r]*best[^\r]*")
    text = child.before + child.after
    child.expect(pexpect.EOF)
    record = Console(record=True, width=COLUMNS, file=io.StringIO())
    record.print(Text("$ hookline train --config-file digits.yaml", style="bold"))
    for line in text.split("\n"):
        # The bar is overwritten: what was last written in the line is on the screen.
        shown = [part for part in re.sub(r"\x1b\[\d?K", "", line).split("\r") if part.strip()]
        record.print(Text.from_ansi(shown[-1] if shown else ""))
    svg = re.sub(r"@font-face \{.*?\}\s*", "", record.export_svg(title=""), flags=re.DOTALL)  # from the network
    (FOLDER / "console.svg").write_text(svg)


def sweep() -> None:
    """Draw three runs, and show them in TensorBoard."""
    for rate in RATES:
        keys = ("SOLVER.BASE_LR", rate, "SOLVER.MAX_ITER", "15ep", "LOG.PERIOD", "2", "SEED", "1")
        run = hookline("train", "--config-file", "digits/mlp.yaml", *keys, "OUTPUT_DIR", f"sweep/lr{rate}")
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    metrics = ["loss", "digits_test/accuracy"]
    subprocess.run(hookline("plot", "sweep", "--metrics", *metrics, "--out", "plot.png"), check=True)
    save(Image.open("plot.png"), "plot")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    board = [sys.executable, "-m", "tensorboard.main", "--logdir", "sweep", "--port", str(port)]
    server = subprocess.Popen(board, stderr=subprocess.DEVNULL)
    try:
        time.sleep(30)  # it reads the runs
        save(screenshot(f"http://localhost:{port}/?darkMode=false#hparams", 1720, 380), "hparams")
    finally:
        server.terminate()
        server.wait()


def notebook() -> None:
    """Run a notebook, and draw its page."""
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=300).execute()
    widgets = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    for output in book.cells[-1].outputs:
        if view := output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None):
            # A page draws a widget with scripts of the network only.
            children = widgets[view["model_id"]]["state"]["children"]
            left, bar, right = (widgets[child.removeprefix("IPY_MODEL_")]["state"] for child in children)
            meter = f"<progress style='width: 300px' value={bar['value']} max={bar['max']}></progress>"
            output["data"]["text/html"] = f"<div>{left['value']} {meter} {right['value']}</div>"
    del book.metadata["widgets"]
    page, _ = nbconvert.HTMLExporter(theme="light").from_notebook_node(book)
    Path("notebook.html").write_text(page)
    save(screenshot(Path("notebook.html").resolve().as_uri(), 1100, 955), "notebook")


def hookline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hookline", *arguments]


def screenshot(url: str, width: int, height: int) -> Image.Image:
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
    page = [f"--window-size={width},{height}", "--screenshot=page.png", url]
    subprocess.run(["chromium", *options, *page], check=True, stderr=subprocess.DEVNULL)
    return Image.open("page.png")


def save(image: Image.Image, name: str) -> None:
    """Save a picture with 256 colors, half of the size."""
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
