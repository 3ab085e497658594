"""The server: rescene's engine, with the nodes of Flower as its sites."""

from rescene.deploy.flower import recipe_server as app

__all__ = ["app"]
