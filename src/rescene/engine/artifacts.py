"""The model that a run leaves."""

from __future__ import annotations

from typing import Any

from safetensors.torch import save

from rescene.core.versions import MODEL
from rescene.engine.checkpoint import write_atomically, write_json
from rescene.engine.experiment import Experiment
from rescene.engine.run_folder import RunFolder
from rescene.lens import open_lens
from rescene.methods.base import Model


def save_model(run: RunFolder, e: Experiment, weights: Model) -> None:
    """The final model, before anything is evaluated or exported that might fail."""
    folder = run.directory("model")
    model = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    write_atomically(folder / "final.safetensors", save(model))
    card = {"schema": MODEL, "arch": vars(e.arch), "classes": list(e.dataset.classes[: e.tasks[-1].num_seen])}
    look: dict[str, Any] = {"mean": e.dataset.transform.mean, "std": e.dataset.transform.std}
    if e.recipe.model.lens is not None:
        lens = open_lens(e.recipe.model.lens)
        look |= {"lens": e.recipe.model.lens, "lens_sha256": lens.sha256, "lens_made_from": lens.made_from}
        look |= {"picture_size": e.dataset.picture_size}
    write_json(folder / "model.json", card | look)
