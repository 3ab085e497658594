"""What leaves a site: measured leakage of uploaded images."""

from rescene.privacy.leakage import NEAR_COPY_DB, nearest_real, psnr, summarise

__all__ = ["NEAR_COPY_DB", "nearest_real", "psnr", "summarise"]
