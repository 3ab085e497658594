"""Attacks that would notice if the privacy were not real: canaries, shadow condensations, positive controls."""
