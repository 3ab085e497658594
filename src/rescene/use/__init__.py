"""From a finished run to something people use: a model in one file, and its answers to pictures."""

from rescene.use.exporting import export
from rescene.use.http_service import Service, serving
from rescene.use.model import Model, open_model
from rescene.use.predicting import Prediction, find_images, mending, predict
from rescene.use.service_container import write_container

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
