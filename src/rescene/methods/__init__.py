"""One file per paper, each readable from top to bottom like its algorithm."""

from rescene.methods.base import Federation, Method, ModelState, Payload, Uploads
from rescene.methods.registry import method_class, method_names, register

__all__ = ["Federation", "Method", "ModelState", "Payload", "Uploads", "method_class", "method_names", "register"]
