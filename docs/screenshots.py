"""Makes the pictures of docs/images: consoles, the plot page, TensorBoard and this site.

    HOOKLINE_CHROMIUM=/usr/bin/chromium python docs/screenshots.py [console] [pages]

Consoles are runs in a pseudo-terminal; pages are drawn by Chromium. Takes two minutes, and needs ``pip install -e
".[dev]"``.
"""

import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from urllib.request import urlopen

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT / "tests/helpers")]
from chromium import Browser  # noqa: E402
from terminals import styled_screen  # noqa: E402

HOOKLINE = str(Path(sys.executable).parent / "hookline")
TRAIN = [HOOKLINE, "train", "--config-file", "digits/convnet.yaml", "SOLVER.MAX_ITER", "6ep"]
HEIGHT = 26


def main() -> None:
    """Make the pictures that the arguments name, by default all."""
    wanted = sys.argv[1:] or ["console", "pages"]
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if "console" in wanted:
            for columns in (80, 120):
                console(folder, columns, bar=True)
                console(folder, columns, bar=False)
        if "pages" in wanted:
            pages(Path(folder))


def console(folder: str, columns: int, bar: bool) -> None:
    """Draw the end of a run, or with the bar the middle of one."""
    command = [*TRAIN, "LOG.PROGRESS_BAR", str(bar), "OUTPUT_DIR", "output/digits_convnet"]
    text = run_in_terminal(command, folder, columns, until="left" if bar else None)
    lines = styled_screen(text, columns)[-HEIGHT:]
    record = Console(width=columns, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in lines:
        record.print(Text.from_ansi(line), soft_wrap=True)
    path = IMAGES / f"console_{columns}{'_bar' if bar else ''}.svg"
    svg = record.export_svg(title="hookline train --config-file digits/convnet.yaml")
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL))  # no fonts from the network
    print(path.relative_to(ROOT), path.stat().st_size)


def run_in_terminal(command: list[str], folder: str, columns: int, until: str | None) -> str:
    """Return what a command writes to a terminal; with ``until``, what it has written in the middle of the run."""
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", HEIGHT, columns, 0, 0))
    path = f"{Path(HOOKLINE).parent}{os.pathsep}{os.environ['PATH']}"  # as in an active environment
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PATH": path}
    process = subprocess.Popen(
        command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
    )
    os.close(slave)
    data = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the command has ended
            break
        data += piece
        if until and data.count(until.encode()) > 12:
            process.kill()
            break
    process.wait()
    os.close(master)
    return data.decode(errors="ignore")


def pages(folder: Path) -> None:
    """Draw the plot page, TensorBoard and the site."""
    for name, lr in (("slow", 0.001), ("fast", 0.003)):
        keys = ["SOLVER.BASE_LR", str(lr), "OUTPUT_DIR", f"runs/{name}"]
        subprocess.run([*TRAIN, *keys], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([HOOKLINE, "plot", "runs", "--out", "curves.html"], cwd=folder, check=True)
    draw(folder / "curves.html", "plot_page.png")
    with tensorboard(folder / "runs") as address:
        draw(f"{address}/#timeseries", "tensorboard.png", wait=15)
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder / "site")], cwd=ROOT, check=True)
    draw(folder / "site/hooks.html", "docs_site.png")


def draw(page: Path | str, name: str, wait: float = 2) -> None:
    """Draw a page in a window of 1280 by 800."""
    with Browser(page, width=1280, height=800) as browser:
        time.sleep(wait)
        browser.screenshot(IMAGES / name)
    shrink(IMAGES / name)
    print(f"docs/images/{name}", (IMAGES / name).stat().st_size)


def shrink(path: Path) -> None:
    """Write a PNG file again with 128 colors."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


@contextmanager
def tensorboard(folder: Path):
    """Serve a folder; yields the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            try:
                urlopen(address).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
