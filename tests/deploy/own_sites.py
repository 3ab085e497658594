"""Three sites with folders of their own images, and plans for them."""

import numpy as np
import yaml
from local_sites import PATIENT, LocalPost
from PIL import Image

from rescene.config import resolve
from rescene.config.site_sections import SitesSection
from rescene.deploy.plan_file import with_plan
from rescene.deploy.server import run_across
from rescene.engine import RunFolder

SMALL = ["model.name=convnet", "model.width=8", "federation.per_round=2", "device=cpu", "train.batch_size=8"]
NAMES = ("ant", "bee", "cat", "dog")


def write_images(folder, counts, site=0):
    """Images that have the colour of their class, with noise of their own."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        colour = np.random.default_rng(sum(name.encode())).integers(60, 196, 3)
        for i in range(count):
            noise = np.random.default_rng([site, i, *name.encode()]).integers(-50, 50, (16, 16, 3))
            Image.fromarray((colour + noise).astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


def own_sites(root, names=NAMES, count=10, **more):
    """Sites 0 to 2; the last has no image of the first class."""
    folders = []
    for k in range(3):
        images = write_images(root / f"images-{k}", dict.fromkeys(names[k == 2 :], count), site=k)
        folder = root / f"site-{k}"
        folder.mkdir(exist_ok=True)
        section = {"client": k, "device": "cpu", "holds": "own", "data": {"path": str(images)}, "hold_out": 0.3}
        (folder / "site.yaml").write_text(yaml.safe_dump(section | more))
        folders.append(folder)
    return folders


def plan_of(*tasks, rounds=2, **more):
    made = [{"classes": list(names), "rounds": own} for names, own in tasks]
    return SitesSection.model_validate({"image_size": 16, "rounds": rounds, "tasks": made} | more)


def run_plan(plan, folder, sites, overrides=(), post=None, path=None):
    """One submission: what `rescene deploy run` does with a plan, without Flower."""
    resolved = with_plan(resolve("smoke", [*SMALL, *overrides]), plan, 3, folder)
    return run_across(resolved, RunFolder(folder), post or LocalPost(sites), PATIENT, plan=path)


def model_of(folder):
    return (folder / "model" / "final.safetensors").read_bytes()
