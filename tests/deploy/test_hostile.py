"""Hostile sites: nothing they send is taken, nothing they send stops a run, and the others' round has the same bits."""

import pytest
from hostile import Canary, FloodedPost
from local_sites import TINY, LocalPost, across, hashes, sites

from rescene.config import resolve
from rescene.deploy.exchange import Patience

SHORT = [*TINY, "federation.num_rounds=1", "model.width=4"]
QUESTIONS = {
    "rescene": {"client_round"},
    "feddm": {"client_round"},
    "fedaf": {"class_logits", "client_round"},
    "fedavg": {"client_round"},
    "fedewc": {"client_round", "consolidate"},
    "fedlwf": {"client_round", "keep_teacher"},
    "target": {"client_round", "picture_size", "receive_past"},
    "refed": {"client_round", "refresh_cache", "set_aside"},
    "fedcbdr": {"client_round", "share_features", "score_images"},
    "glfc": {"client_round", "receive_old_model", "keep_exemplars"},
    "cfed": {"client_round", "picture_size", "keep_teacher", "learn", "review"},
    "mfcl": {"client_round", "picture_size", "receive_generator"},
    "icarl": {"client_round", "keep_exemplars"},
    "fedprox": {"client_round"},
    "scaffold": {"client_round"},
    "fot": {"client_round", "sketch_inputs"},
    "fedssi": {"client_round", "consolidate"},
    "pilora": {"client_round", "receive_network"},
    "fedweit": {"client_round", "receive_adaptives"},
    "fedcil": {"client_round", "picture_size"},
    "fedcprompt": {"client_round", "receive_network"},
}
FAST = ("rescene", "fedavg", "fedcbdr")
PER_ANSWER = {"rescene": 180, "fedavg": 180, "fedcbdr": 45}


@pytest.mark.parametrize(
    "method", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in QUESTIONS]
)
def test_a_flood_of_hostile_uploads_changes_no_bit(tmp_path, method):
    network = ["model.name=vit-mini"] if method in ("pilora", "fedcprompt") else []
    resolved = resolve("smoke", [*SHORT, f"method={method}", *network])
    Canary.path, per_answer = tmp_path / "pickle was here", PER_ANSWER.get(method, 40)
    across(resolved, tmp_path / "quiet", LocalPost(sites(tmp_path)))
    post = FloodedPost(sites(tmp_path / "flooded"), per_answer)
    across(resolved, tmp_path / "loud", post, Patience(0, 600, 0, attempts=per_answer + 2))
    assert post.asked - {"hello"} == QUESTIONS[method]
    assert post.delivered == post.asked_again >= 4 * per_answer  # each was refused, and the letter sent again
    assert min(post.kinds.values()) > 0 and not Canary.path.exists()
    assert hashes(tmp_path / "loud") == hashes(tmp_path / "quiet")
