"""The server: rescene's engine, with the nodes of Flower as its sites."""

from rescene.deploy.flower_app import server as app

__all__ = ["app"]
