"""What leaves a site: measured leakage of uploaded images; mechanisms, their accounting and the sites' ledgers."""

from rescene.privacy.leakage import NEAR_COPY_DB, nearest_real, psnr, summarise, summarise_starts

__all__ = ["NEAR_COPY_DB", "nearest_real", "psnr", "summarise", "summarise_starts"]
