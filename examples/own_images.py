"""A folder of images made on the spot, to try ReSCENE on data of your own.

    python examples/own_images.py images                   # images/<class>/*.png: six shapes, unequal numbers
    python examples/own_images.py images --domains         # images/<light>/<class>/*.png: three shapes by day and by night
    rescene data inspect images                            # classes, warnings, proposed tasks, the command to run
    rescene run demo data.path=images tasks.count=3 federation.num_clients=2 federation.per_round=2 --out runs/shapes
    rescene predict runs/shapes images/star --gallery stars.html

Classes may arrive in unequal tasks, 'tasks.sizes=[3,2,1]', or by name, 'tasks.plan=[[circle,star],[cross]]'; with
--domains each light is a task of the same classes, tasks.scenario=domain (and rescene data inspect images --layout domains).
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 32
COUNTS = {"circle": 80, "cross": 70, "ring": 60, "square": 80, "star": 60, "triangle": 70}
LIGHTS = {"day": (235, 60), "night": (30, 200)}  # brightness of the ground and of the shape


def draw(shape: str, ground: int, ink: int, dice: random.Random) -> Image.Image:
    """One picture: a shape of random place, size, turn and tint on noisy ground."""
    picture = Image.new("RGB", (4 * SIZE, 4 * SIZE), tuple(_near(ground, 20, dice) for _ in range(3)))
    pen, colour = ImageDraw.Draw(picture), tuple(_near(ink, 40, dice) for _ in range(3))
    x, y, r = (dice.uniform(a, b) * SIZE for a, b in ((1.6, 2.4), (1.6, 2.4), (0.9, 1.5)))
    turn = dice.uniform(-0.25, 0.25)
    if shape in ("circle", "ring"):
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour if shape == "circle" else None, outline=colour, width=14)
    elif shape == "cross":
        for angle in (turn, turn + math.pi / 2):
            dx, dy = r * math.cos(angle), r * math.sin(angle)
            pen.line((x - dx, y - dy, x + dx, y + dy), fill=colour, width=16)
    else:
        corners = {"square": 4, "triangle": 3, "star": 10}[shape]
        radii = [r * (0.4 if shape == "star" and i % 2 else 1.0) for i in range(corners)]
        angles = [turn - math.pi / 2 + 2 * math.pi * i / corners for i in range(corners)]
        pen.polygon(
            [(x + q * math.cos(a), y + q * math.sin(a)) for q, a in zip(radii, angles, strict=True)], fill=colour
        )
    small = picture.resize((SIZE, SIZE))
    noise = Image.frombytes("RGB", (SIZE, SIZE), dice.randbytes(3 * SIZE * SIZE))
    return Image.blend(small, noise, 0.08)


def make(folder: Path, domains: bool = False, seed: int = 0) -> int:
    """Fill a folder with pictures; returns how many. The same seed draws the same pictures."""
    dice, number = random.Random(seed), 0
    lights = LIGHTS if domains else {"": LIGHTS["day"]}
    for light, (ground, ink) in lights.items():
        for shape, count in list(COUNTS.items())[: 3 if domains else None]:
            home = folder / light / shape
            home.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                draw(shape, ground, ink, dice).save(home / f"{i:03d}.png")
            number += count
    return number


def _near(value: int, spread: int, dice: random.Random) -> int:
    return min(255, max(0, value + dice.randint(-spread, spread)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--domains", action="store_true", help="the same three shapes in two lights")
    given = parser.parse_args()
    if given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty")
    layout = " --layout domains" if given.domains else ""
    print(f"{make(given.folder, given.domains)} pictures in {given.folder}")
    print(f"next: rescene data inspect {given.folder}{layout}")
