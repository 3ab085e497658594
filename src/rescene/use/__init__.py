"""From a finished run to something people use: a model in one file, and its answers to pictures."""

from rescene.use.exporting import export
from rescene.use.model import Model, open_model
from rescene.use.predicting import Prediction, find_images, predict

__all__ = ["Model", "Prediction", "export", "find_images", "open_model", "predict"]
