"""A model's service in a container: a folder with the model and a Containerfile that installs what serves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import rescene
from rescene.core.errors import ConfigError
from rescene.use.exporting import export
from rescene.use.formats import CAN_RUN_CODE
from rescene.use.model import open_model

UID, PORT = 10002, 8000
TORCH = "torch==2.13.0"
CONTAINERFILE = """\
# A model's service in a container: no root, nothing writable, no way out. Build and run it in this folder (docker: the same
# without --format; without a GPU, torch's CPU build saves gigabytes):
#
#   podman build --format docker -t rescene-model -f Containerfile .
#   podman run -d --name rescene-model --read-only --tmpfs /tmp --cap-drop=all --security-opt=no-new-privileges \\
#     --memory 2g --pids-limit 128 -p 127.0.0.1:{port}:{port} rescene-model
#
# Then open http://127.0.0.1:{port}/. The service has no password and speaks plain HTTP: to publish it beyond this machine,
# put a proxy with both before it, and add "--allow-host", "NAME" to the last line.
FROM python:3.11-slim
RUN pip install --no-cache-dir --no-deps "rescene=={version}" \\
 && pip install --no-cache-dir --no-deps --require-hashes -r \\
    "$(python -c 'import rescene; print(rescene.__path__[0])')/locks/base.txt" \\
 && pip install --no-cache-dir "{torch}"{onnx}
RUN useradd --uid {uid} --no-create-home --home-dir /tmp --shell /usr/sbin/nologin service
COPY --chmod=444 {model} /model/{model}
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER {uid}
WORKDIR /tmp
EXPOSE {port}
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \\
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:{port}/health', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT {start}
"""


def write_container(model: Path, out: Path, trust: bool = False) -> list[Path]:
    """Put a model and its Containerfile into the folder ``out``, which must be new or empty. A run is exported first."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = "name a folder that does not exist yet"
        raise ConfigError("E502", "the folder of the container is not empty", where=str(out), fix=fix)
    open_model(model, trust)  # a file that cannot be opened here cannot be opened there
    out.mkdir(parents=True, exist_ok=True)
    if model.is_dir():
        export(model, ["safetensors"], out)
        file = out / "model.safetensors"
    else:
        file = Path(shutil.copyfile(model, out / f"model{model.suffix.lower()}"))
    recipe, ignore = out / "Containerfile", out / ".dockerignore"
    recipe.write_text(containerfile(file.name), encoding="utf-8")
    ignore.write_text(f"*\n!Containerfile\n!{file.name}\n", encoding="utf-8")
    return [recipe, ignore, file]


def containerfile(model: str) -> str:
    """The Containerfile that serves the file ``model`` of its folder."""
    kind = model.rpartition(".")[2]
    trust = ["--trust"] if kind in CAN_RUN_CODE else []
    start = ["rescene", "serve", f"/model/{model}", "--host", "0.0.0.0", "--port", str(PORT), *trust]
    return CONTAINERFILE.format(
        port=PORT,
        uid=UID,
        version=rescene.__version__,
        torch=TORCH,
        model=model,
        onnx=' "onnx>=1.17" "onnxscript>=0.6" "onnxruntime>=1.18"' if kind == "onnx" else "",
        start=json.dumps(start),
    )
