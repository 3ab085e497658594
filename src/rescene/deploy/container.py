"""A site in a container: the file that `rescene deploy init` puts into each site's folder, and how to build and run it."""

from __future__ import annotations

import rescene

UID = 10001
CONTAINERFILE = f"""\
# A site in a container: no root, images read-only, no way in. Build and run it in this folder (docker: the same without
# --format and --userns; without a GPU, torch's CPU build saves gigabytes):
#
#   podman build --format docker -t rescene-site -f Containerfile .
#   podman run -d --name rescene-site --restart=always --user $(id -u) --userns=keep-id \\
#     --read-only --tmpfs /tmp --cap-drop=all --security-opt=no-new-privileges \\
#     -v "$PWD":/site -v /data/images:/images:ro rescene-site
#
# In site.yaml:  data: {{path: /images}}.  This folder stays outside the image: it holds node.key, and state/ must outlive
# the container. No port is published; the site calls the server, so let it out to that address alone.
FROM python:3.11-slim
RUN pip install --no-cache-dir --no-deps "rescene=={rescene.__version__}" \
 && pip install --no-cache-dir --no-deps --require-hashes -r \
    "$(python -c 'import rescene; print(rescene.__path__[0])')/locks/deploy.txt" \
 && pip install --no-cache-dir "torch==2.13.0"
RUN useradd --uid {UID} --no-create-home --home-dir /tmp --shell /usr/sbin/nologin site
ENV HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER {UID}
WORKDIR /site
HEALTHCHECK --interval=60s --timeout=10s --start-period=120s --retries=3 \\
  CMD ["sh", "-c", "kill -0 $(sed -n 's/.*\\"pid\\": *\\\\([0-9]*\\\\).*/\\\\1/p' /site/processes/node.json)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["rescene", "deploy", "site", "/site", "--wait"]
"""
DOCKERIGNORE = "*\n!Containerfile\n"  # nothing of this folder, and node.key least of all, goes into an image
