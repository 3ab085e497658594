"""What a secure sum costs beyond a plain one: 10 sites with 4 MB each.

    python benchmarks/secure_sum.py [--sites 10] [--megabytes 4] [--lost 3]

Sites and server work one after the other in this process, messages are packed and unpacked as on the wire, and nothing waits for
a network; the seconds are of one core. The plain round packs and unpacks the same numbers and adds them up. With ``--lost`` so
many sites go away after the shares were dealt, which is the dearest moment: the server has to take their masks out of everybody's
numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "privacy"))

from sum_world import World

from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.summing import MASK, STEPS
from rescene.privacy.totals import added, threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--lost", type=int, default=3)
    given = parser.parse_args()
    count = int(given.megabytes * 2**20) // 4
    parts = [{"a": torch.randint(-(2**26), 2**26, (count,), dtype=torch.int32)} for _ in range(given.sites)]
    least = threshold(given.sites, 0.7, 2)
    print(f"{given.sites} sites, {given.megabytes:g} MB each, at least {least} in a sum; seconds of one core")
    for lost in sorted({0, given.lost}):
        plain_s, secure_s, exact = measured(parts, least, lost)
        print(
            f"{lost} lost: plain {plain_s:.2f} s, secure {secure_s:.2f} s, beyond it {secure_s - plain_s:.2f} s, exact: {exact}"
        )


def measured(parts: list[dict[str, torch.Tensor]], least: int, lost: int) -> tuple[float, float, bool]:
    """Seconds of a plain and of a secure round, and whether both give the same bits."""
    begin = time.process_time()
    there = [unpack_message(pack_message(part).data).tree for part in parts[lost:]]
    plain = added(there)
    plain_s, begin = time.process_time() - begin, time.process_time()
    world = World(
        len(parts), least, parts.__getitem__, form=lambda *_: None,
        lost=lambda step, client: client < lost and step in STEPS[STEPS.index(MASK) :],
    )  # fmt: skip
    found, clients = world.hold()
    secure_s = time.process_time() - begin
    exact = clients == list(range(lost, len(parts))) and torch.equal(found["a"], plain["a"])
    return plain_s, secure_s, exact


if __name__ == "__main__":
    main()
