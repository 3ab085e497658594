"""One file per paper, each readable from top to bottom like its algorithm."""

from rescene.methods.base import Federation, Method, ModelState, Payload, Uploads
from rescene.methods.registry import DEFAULT_METHOD, method_class, method_names, register

__all__ = [
    "DEFAULT_METHOD",
    "Federation",
    "Method",
    "ModelState",
    "Payload",
    "Uploads",
    "method_class",
    "method_names",
    "register",
]
