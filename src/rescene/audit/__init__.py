"""Attacks that would notice if the privacy were not real: canaries, shadow condensations, a red team, positive controls."""

from rescene.audit.controls import run_controls
from rescene.audit.redteam import red_team, red_team_words
from rescene.audit.stage import stage_of
from rescene.audit.subject import AuditScale, audit, audit_words, control_words

__all__ = [
    "AuditScale",
    "audit",
    "audit_words",
    "control_words",
    "red_team",
    "red_team_words",
    "run_controls",
    "stage_of",
]
