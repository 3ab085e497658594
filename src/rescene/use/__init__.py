"""From a finished run to something people use: a model in one file, and its answers to pictures."""

from rescene.use.exporting import export, write_container
from rescene.use.http_service import Service, serving
from rescene.use.model import Model, Prediction, find_images, mending, open_model, predict

__all__ = [
    "Model",
    "Prediction",
    "Service",
    "export",
    "find_images",
    "mending",
    "open_model",
    "predict",
    "serving",
    "write_container",
]
