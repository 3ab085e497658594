"""What leaves a site: measured leakage of uploaded images; mechanisms, their accounting and the sites' ledgers."""

from rescene.privacy.leakage import (
    MOST_TRACED,
    NEAR_COPY_DB,
    evenly,
    nearest_real,
    psnr,
    summarise,
    summarise_starts,
    summarise_traced,
)

__all__ = [
    "MOST_TRACED",
    "NEAR_COPY_DB",
    "evenly",
    "nearest_real",
    "psnr",
    "summarise",
    "summarise_starts",
    "summarise_traced",
]
