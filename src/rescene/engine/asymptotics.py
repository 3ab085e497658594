"""The paper's asymptotic compute per task (App. E, total-compute table) and its legend, for `rescene explain`."""

from __future__ import annotations

import re

LEGEND = {
    "R": "rounds per task",
    "K": "participants of a round",
    "N": "clients in all",
    "E": "local epochs",
    "E_srv": "server epochs per round",
    "E_PIM": "epochs of Re-Fed's personalised informative model",
    "D_loc": "local images of a client",
    "D_mem": "replay images it stores",
    "D_pool": "previous images that Re-Fed scores at a task boundary",
    "F": "forward and backward cost of one image",
    "F_enc": "the same for GLFC's encoder",
    "I": "gradient-inversion steps per prototype",
    "|C_t|": "classes of the task",
    "|C_{t-1}|": "classes of the previous task",
    "d": "feature dimension of the leverage scores",
    "R_syn": "synthesis rounds",
    "S_kd": "distillation steps per synthesis round",
    "B_syn": "synthesis batch",
    "P": "model parameters",
    "S": "condensation steps",
    "IPC": "surrogates per class and client",
    "|B u S|": "images in buffers and pool",
    "|S_r|": "surrogates of one round",
}
OURS = " [ours: not in the paper's table]"
COMPUTE = {  # method -> (all clients, server)
    "fedavg": ("O(R K E D_loc F)", "O(R K P)"),
    "fedewc": ("O(R K E D_loc F)", "O(R K P)"),
    "fedlwf": ("O(R K E D_loc F)", "O(R K P)"),
    "target": ("O(R K E D_loc F)", "O(R_syn S_kd B_syn F)"),
    "glfc": ("O(R K E (D_loc + D_mem) F)", "O(R K P + I K |C_{t-1}| F_enc)"),
    "fedcbdr": ("O(R K E (D_loc + D_mem) F + N D_loc F)", "O(R K P + N D_loc d^2)"),
    "refed": ("O(R K E (D_loc + D_mem) F + N E_PIM D_pool F)", "O(R K P)"),
    "rescene": ("O(R K S IPC |C_t| F)", "O(R E_srv |B u S| F)"),
    "feddm": ("O(R K S IPC |C_t| F)" + OURS, "O(R E_srv |S_r| F)" + OURS),
    "fedaf": ("O(R K (S IPC |C_t| + D_loc) F)" + OURS, "O(R E_srv |S_r| F)" + OURS),
}
_SYMBOL = re.compile(r"\|[^|]+\||[A-Za-z]\w*")


def compute_facts(method: str) -> dict[str, str]:
    """The two formulas and the meaning of their symbols; empty for a method without any.

    >>> compute_facts("fedavg")["server compute per task"]
    'O(R K P)'
    """
    if method not in COMPUTE:
        return {}
    clients, server = COMPUTE[method]
    inner = " ".join(formula.partition(" [")[0][2:-1] for formula in (clients, server))
    symbols = dict.fromkeys(_SYMBOL.findall(inner))
    return {
        "client compute per task": clients,
        "server compute per task": server,
        "where": "; ".join(f"{symbol} {LEGEND[symbol]}" for symbol in symbols),
    }
