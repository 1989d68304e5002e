"""Drawings of shapes as image files, one folder per class."""

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from hookline.engine.data import ImageFolder

CLASSES = {"solids": ("circle", "square", "triangle"), "signs": ("plus", "star")}


def shapes(
    split: Literal["train", "test"],
    kind: Literal["solids", "signs"] = "solids",
    per_class: int = 150,
    transforms: Sequence[Any] = (),
    folder: str = "./output/data/shapes",
) -> ImageFolder:
    """Bright shapes of random size, place and angle on a dark ground. Needs Pillow.

    Args:
        split: "test" has other drawings.
        kind: circles, squares and triangles; or pluses and stars.
        per_class: drawings of each class.
        transforms: see :class:`ImageFolder`.
        folder: where the files are written, if they are not there.
    """
    root = Path(folder, f"{kind}_{split}_{per_class}")
    if not root.exists():
        _draw_all(root, CLASSES[kind], per_class, seed=f"{kind} {split}")
    return ImageFolder(str(root), size=32, transforms=transforms)


def _draw_all(root: Path, names: Sequence[str], number: int, seed: str) -> None:
    random, temporary = Random(seed), root.with_name(f"{root.name}.{os.getpid()}")
    for name in names:
        (temporary / name).mkdir(parents=True)
        for i in range(number):
            _draw(name, random).save(temporary / name / f"{i:04}.png")
    try:
        temporary.rename(root)
    except OSError:  # another rank was faster
        shutil.rmtree(temporary)


def _draw(name: str, random: Random) -> Any:
    from PIL import Image, ImageDraw

    size = random.randint(32, 48)
    image = Image.frombytes("L", (size, size), random.randbytes(size * size)).convert("RGB")
    image = Image.blend(image, Image.new("RGB", (size, size), _color(random, 0, 100)), 0.9)
    draw, color = ImageDraw.Draw(image), _color(random, 150, 250)
    radius, turn = random.uniform(0.3, 0.45) * size, random.uniform(-0.3, 0.3)
    x, y = (random.uniform(radius, size - radius) for _ in range(2))

    def corners(number: int, inner: float = 1.0) -> list[tuple[float, float]]:
        steps = [(turn + 2 * math.pi * i / number, radius * (inner if i % 2 else 1)) for i in range(number)]
        return [(x + r * math.cos(angle), y + r * math.sin(angle)) for angle, r in steps]

    box = (x - radius, y - radius, x + radius, y + radius)
    if name == "circle":
        draw.ellipse(box, fill=color)
    elif name == "plus":
        ends = corners(4)
        for start, end in ((0, 2), (1, 3)):
            draw.line([ends[start], ends[end]], fill=color, width=max(2, int(radius / 2)))
    else:
        number, inner = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.4)}[name]
        draw.polygon(corners(number, inner), fill=color)
    return image


def _color(random: Random, darkest: int, brightest: int) -> tuple[int, int, int]:
    return random.randint(darkest, brightest), random.randint(darkest, brightest), random.randint(darkest, brightest)
