"""Seeded bugs that the suite must catch: `make mutations`. Each changes one line of a copy of the package.

The bugs are the ones public code really has, or nearly had: wrong axis, squared mean, reversed KL, BatchNorm left in train
mode, schedules off by one, rotations not undone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = (
    Mutation("matching sums over the wrong axis", "functional/matching.py",
             "squares.sum(dim=1)", "squares.sum(dim=0)", "tests/functional/test_balance_and_matching.py"),
    Mutation("residual of herding with the wrong sign", "functional/herding.py",
             "cost += 2.0 * column", "cost -= 2.0 * column", "tests/functional/test_herding.py"),
    Mutation("recent window one round too long", "functional/herding.py",
             "num_rounds - width + 1", "num_rounds - width", "tests/functional/test_herding.py"),
    Mutation("an empty class is sampled at alpha 0", "functional/balance.py",
             "torch.where(counts > 0, counts.clamp(min=1e-30).pow(alpha), torch.zeros_like(counts))", "counts.pow(alpha)",
             "tests/functional/test_balance_and_matching.py"),
    Mutation("an answer to another question counts", "deploy/answers.py",
             "not hmac.compare_digest(token, question.token)", "not token", "tests/deploy/test_any_order.py"),
    Mutation("a site is asked again for what is in the journal", "deploy/server.py",
             "if kept is not None:", "if kept == b'':", "tests/deploy/test_any_order.py"),
    Mutation("something travels beside the content", "deploy/message_bytes.py",
             "if again != text:", "if not again:", "tests/deploy/test_message.py"),
    Mutation("NaN lies in every range", "methods/upload_schema.py",
             "not low <= smallest <= largest <= high", "(smallest < low or largest > high)", "tests/methods/test_upload_schema.py"),
    Mutation("more pictures of a class than asked for", "methods/upload_schema.py",
             "int(counts.max()) <= most_per_class", "int(counts.max()) >= 1", "tests/methods/test_upload_schema.py"),
    Mutation("average ignores its weights", "functional/model_average.py",
             "entry.double() * (weight / total)", "entry.double() / len(entries)", "tests/functional/test_balance_and_matching.py"),
    Mutation("forgetting takes the best of the wrong axis", "functional/metrics.py",
             "np.max(array[j:, j])", "np.nanmax(array[j])", "tests/functional/test_metrics.py"),
    Mutation("perturbation not projected", "functional/matching.py",
             "max=1.0)", "max=1e9)", "tests/functional/test_balance_and_matching.py"),
    Mutation("BatchNorm in train mode while condensing", "training/condensation.py",
             "net.eval().requires_grad_(False)", "net.train().requires_grad_(False)", "tests/training/test_condensation.py"),
    Mutation("cosine schedule off by one epoch", "training/sgd.py",
             "math.pi * epoch / epochs", "math.pi * (epoch + 1) / epochs", "tests/training/test_sgd.py"),
    Mutation("reversed KL", "functional/distillation.py",
             "F.cross_entropy(student_logits[:, :num_old] / temperature, targets)",
             "F.cross_entropy(teacher_logits / temperature, (student_logits[:, :num_old] / temperature).softmax(dim=1))",
             "tests/methods/test_distillation.py"),
    Mutation("Fisher from the squared mean gradient", "functional/fisher.py",
             "gradient.square().sum(dim=0) if per_sample", "gradient.sum(dim=0).square() if per_sample", "tests/methods/test_fedewc.py"),
    Mutation("private rotation not undone", "methods/fedcbdr.py",
             'row_leverage(private.T @ payload["left"])', 'row_leverage(payload["left"])', "tests/methods/test_fedcbdr.py"),
    Mutation("importance without 1/p", "methods/refed.py",
             "self._norms(net, x, y) / p", "self._norms(net, x, y)", "tests/methods/test_refed.py"),
    Mutation("compensation over the whole batch instead of groups", "functional/distillation.py",
             "group = old.long()", "group = torch.zeros_like(old.long())", "tests/methods/test_glfc_mathematics.py"),
    Mutation("adversarial term with the wrong sign", "functional/image_losses.py",
             "return -(divergence * agree).mean()", "return (divergence * agree).mean()", "tests/methods/test_target_synthesis.py"),
    Mutation("temperatures of old and new swapped", "functional/balance.py",
             "temperatures[:num_old] = tau_old", "temperatures[num_old:] = tau_old", "tests/methods/test_fedcbdr.py"),
    Mutation("split without the size cap", "data/partition.py",
             "if capped else math.inf", "if not capped else math.inf", "tests/data"),
    Mutation("the pool of a finished task is not dropped", "methods/rescene.py",
             "replace(state, pool=(), buffers=state.buffers + (kept,))", "replace(state, buffers=state.buffers + (kept,))",
             "tests/engine/test_runs.py -k at_most"),
    Mutation("a buffer keeps what a site that left has sent", "methods/rescene_extensions.py",
             "p.clients != client", "p.clients >= 0", "tests/engine/test_withdrawal.py -k others_alone"),
    Mutation("a class is closed a round too early", "methods/rescene_extensions.py",
             "now - last >= patience", "now - last >= patience - 1", "tests/engine/test_stream.py -k stayed_away"),
    Mutation("the ledger counts pictures as they were before the wire", "engine/federation.py",
             "list(messages.values()), len(clients)", "[up for up, _ in answers.values()], len(clients)",
             "tests/engine/test_wire.py -k ledger"),
    Mutation("a cut privacy ledger is believed", "privacy/ledger_file.py",
             "return end.entries <= self.end.entries and", "return", "tests/privacy/test_ledger.py -k set_back"),
)  # fmt: skip


def caught(mutation: Mutation) -> bool:
    """Whether the named tests fail on a copy with this bug."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src")
        shutil.copytree(ROOT / "tests", copy / "tests")
        path = copy / "src" / "rescene" / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            raise SystemExit(
                f"{mutation.name}: the line to change stands {text.count(mutation.before)} times in {mutation.file}"
            )
        path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        return done.returncode == 1


def main() -> None:
    survivors = []
    for mutation in MUTATIONS:
        found = caught(mutation)
        print(f"{'caught  ' if found else 'SURVIVED'}  {mutation.name}", flush=True)
        survivors += [] if found else [mutation.name]
    print(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} caught")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
