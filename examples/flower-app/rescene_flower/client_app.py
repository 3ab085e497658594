"""A site: simulated by Flower, or run by somebody from a site's folder."""

from rescene.deploy.flower import client as app

__all__ = ["app"]
