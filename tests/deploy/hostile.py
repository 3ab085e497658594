"""Hostile uploads, made from honest ones: by kind, with all checksums right where a liar can make them right, and raw fuzz.

None of them means the same as the honest one, nor is any of them something that the site could have sent instead: parts that
are optional are never left out, and numbers that are free (weights within their range, say) are never just other numbers.
"""

import hashlib
import io
import json
import pickle
import struct
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from local_sites import LocalPost

from rescene.deploy.exchange import HELLO, Remembered, Reply, Request
from rescene.deploy.message_bytes import pack_message, unpack_message

OPTIONAL = ("notes", "prototypes")
HEAD = struct.Struct("<4sI32s")


@dataclass
class Case:
    """One honest answer, what else the attacker has seen, and its dice."""

    data: bytes
    seen: list[bytes]
    random: Random
    reply: Reply = field(init=False)

    def __post_init__(self):
        self.reply = unpack_message(self.data).tree


def changed(case, **parts):
    return pack_message(replace(case.reply, **parts)).data


def signed(text, body=b""):
    text += b" " * (-(len(text) + HEAD.size) % 8)
    return HEAD.pack(b"RSM2", len(text), hashlib.sha256(text).digest()) + text + body


def parted(case):
    """Header and body of the honest message."""
    _, length, _ = HEAD.unpack_from(case.data)
    return json.loads(case.data[HEAD.size : HEAD.size + length]), case.data[HEAD.size + length :]


# raw


def flipped(case):
    data = bytearray(case.data)
    for _ in range(case.random.randint(1, 8)):
        data[case.random.randrange(len(data))] ^= case.random.randint(1, 255)
    return bytes(data) if data != case.data else b""


def cut(case):
    return case.data[: case.random.randrange(len(case.data))]


def longer(case):
    return case.data + case.random.randbytes(case.random.choice([1, 8, 4096]))


def spliced(case):
    at = case.random.randrange(1, len(case.data))
    return case.data[:at] + b"\0" * case.random.choice([1, 8]) + case.data[at:]


def noise(case):
    return case.random.choice([b"", b"RSM2", b"RSM9", b"RSM1"]) + case.random.randbytes(case.random.randrange(2000))


class Canary:
    """Unpickling it leaves a trace."""

    path = Path("unset")

    def __reduce__(self):
        return (Path.touch, (Canary.path,))


def foreign(case):
    """Formats that other systems take from the network."""
    kind, out = case.random.randrange(5), io.BytesIO()
    if kind == 0:
        return pickle.dumps(Canary())
    if kind == 1:
        torch.save({"model": torch.zeros(3)}, out)
    elif kind == 2:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("model.npy", bytes(1 << 20))
    elif kind == 3:
        out.write(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }")
    else:
        out.write(signed(pickle.dumps(Canary())))
    return out.getvalue()


# the header, signed anew


def _chunk(case, header):
    """A random chunk with tensors in it, and one of their names; None if nothing has tensors."""
    chunks = [chunk for chunk in header["chunks"] if chunk["tensors"]]
    if not chunks:
        return None, None
    chunk = case.random.choice(chunks)
    return chunk, case.random.choice(list(chunk["tensors"]))


def lying_header(case):
    """Shapes, types and places that are not what lies there, or not possible."""
    header, body = parted(case)
    chunk, name = _chunk(case, header)
    if chunk is None:
        header["chunks"] = [{"sha256": hashlib.sha256(b"").hexdigest(), "here": True, "tensors": {}}]
        return signed(json.dumps(header).encode(), body)
    dtype, shape = chunk["tensors"][name]
    lie = case.random.randrange(9)
    if lie == 0:
        chunk["tensors"][name] = [dtype, [1 << 30, 1 << 30]]
    elif lie == 1:
        chunk["tensors"][name] = [dtype, [-1, *shape]]
    elif lie == 2:
        chunk["tensors"][name] = ["F8", shape]
    elif lie == 3:
        chunk["tensors"][name] = [dtype, [*shape, True]]
    elif lie == 4:
        chunk["here"] = False
    elif lie == 5:
        chunk["sha256"] = chunk["sha256"].upper() + "0"
    elif lie == 6:
        chunk["tensors"][name] = [dtype, [*([1 << 30] * 9), 0]]
    elif lie == 7:
        header["chunks"].append(
            {"sha256": hashlib.sha256(bytes(8)).hexdigest(), "here": True, "tensors": {"x": ["I64", [1]]}}
        )
        body += bytes(8)  # smuggled in beside the content
    else:
        header["chunks"].append(dict(chunk))
    return signed(json.dumps(header).encode(), body)


def odd_header(case):
    """The same content in other words, and JSON that hurts."""
    header, body = parted(case)
    text = json.dumps(header)
    words = [
        json.dumps(header, indent=1),
        text.replace('"chunks"', '"chunks": [], "chunks"'),
        json.dumps(header | {"more": 1}),
        '{"skeleton": ' + '{"$list": [' * 5000 + "]}" * 5000 + ', "chunks": []}',
        '{"skeleton": [' + "[]," * 400_000 + '[]], "chunks": []}',
        '{"skeleton": {"$list": [' + '{"$dict": {}}, ' * 4_000 + '{"$dict": {}}]}, "chunks": []}',
        '{"skeleton": ' + "9" * 5000 + ', "chunks": []}',
        '{"skeleton": NaN, "chunks": 7}',
        json.dumps(header | {"skeleton": {"$record": "os.system", "fields": {}}}),
        json.dumps(header | {"skeleton": {"$record": "rescene.deploy.exchange.Reply", "fields": {"evil": 1}}}),
        json.dumps(header | {"skeleton": {"$tensor": [99, "a"]}}),
        "[]",
        "{}",
        "",
    ]
    return signed(case.random.choice(words).encode(), body)


# the reply


def false_identity(case):
    token, client = case.reply.token, case.reply.client
    who = [client + 1, client - 1, True, str(client), None, float(client), 1 << 70, -5]
    what = [
        "",
        None,
        token[:-1],
        token.upper() + "G",
        token + "0",
        case.random.randbytes(16).hex(),
        "\ud800",
        7,
        [token],
    ]
    if case.random.random() < 0.5:
        return changed(case, client=case.random.choice(who))
    return changed(case, token=case.random.choice(what))


def replayed(case):
    """What was said before, by whomever."""
    return case.random.choice([data for data in case.seen if data != case.data] or [b"nothing"])


def stolen(case):
    """Another's answer with one's own number, but not one's own token."""
    others = [data for data in case.seen if unpack_message(data).tree.token != case.reply.token]
    if not others:
        return b"nothing"
    return pack_message(replace(unpack_message(case.random.choice(others)).tree, client=case.reply.client)).data


def odd_reply(case):
    state = Remembered("0" * 64, 1)
    parts = [
        {"flops": -1}, {"flops": True}, {"flops": 1.5}, {"flops": 1 << 80}, {"flops": None},
        {"state": "0" * 64}, {"state": Remembered("../../etc/passwd", 1)}, {"state": replace(state, num_bytes=-1)},
        {"state": replace(state, sha256="0" * 63 + "G")}, {"state": replace(state, num_bytes=1 << 90)},
        {"state": torch.zeros(3)}, {"problem": ("E342", "both an answer and a problem")},
        {"upload": None, "state": None, "problem": ("boom", "not a code")},
        {"upload": None, "state": None, "problem": ("E321", "two\nlines")},
        {"upload": None, "state": None, "problem": ("E321", "\x1b[2J")},
        {"upload": None, "state": None, "problem": ("E321", "x" * 100_000)},
        {"upload": None, "state": None, "problem": ["E321", "a list"]},
        {"told": (("W310", "flood"),) * 1000}, {"told": "W310"}, {"told": (("W310",),)}, {"told": (("W310", 3),)},
        {"told": (("<b>", "words"),)},
    ]  # fmt: skip
    return changed(case, **case.random.choice(parts))


def odd_upload(case):
    wrong = [None, [], (), 0, "", True, torch.zeros(2), [case.reply.upload], {"upload": case.reply.upload}, case.reply,
             Request("", "", "", "", 0, 0, (), None, "")]  # fmt: skip
    return changed(case, upload=case.random.choice(wrong))


# the values


def _leaves(tree, path=()):
    """Paths of everything below that is not a dict; notes are free."""
    if isinstance(tree, dict) and tree:
        for key, child in tree.items():
            if key != "notes":
                yield from _leaves(child, (*path, key))
    elif path:
        yield path, tree


def _with(tree, path, make):
    """The tree with ``make(child)`` at ``path``."""
    if not path:
        return make(tree)
    return {key: _with(child, path[1:], make) if key == path[0] else child for key, child in tree.items()}


def _retyped(t, random):
    others = [
        d for d in (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8) if d != t.dtype
    ]
    return t.to(random.choice(others))


def _reshaped(t, random):
    forms = [lambda: t.unsqueeze(0), lambda: t.unsqueeze(-1)]
    if t.ndim > 1:
        forms += [lambda: t.flatten(), lambda: t[0]]
    if t.ndim and len(t):
        forms += [lambda: t[:-1], lambda: torch.cat([t, t[:1]])]
    return random.choice(forms)()


def _spoilt(t, random):
    flat = t.clone().reshape(-1)
    floats = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30]
    flat[random.randrange(len(flat))] = random.choice(floats if t.is_floating_point() else [-1, -(1 << 50), 1 << 50])
    return flat.reshape(t.shape)


def wrong_value(case):
    upload, random = case.reply.upload, case.random
    leaves = list(_leaves(upload))
    if not leaves:
        return changed(case, upload={"images": torch.zeros(1, 3, 4, 4)})
    path, leaf = random.choice(leaves)
    if not isinstance(leaf, torch.Tensor):
        numbers = [True, -1, float(leaf), str(leaf), None, 1 << 80, [leaf], torch.tensor(leaf)]
        made = random.choice(numbers)
    elif random.random() < 0.2:
        made = random.choice([None, 0, "tensor", [1.0], {}, True, {"value": leaf}])
    else:
        change = random.choice([_retyped, _reshaped, _spoilt] if leaf.numel() else [_retyped, _reshaped])
        made = change(leaf, random)
    return changed(case, upload=_with(upload, path, lambda _: made))


def wrong_keys(case):
    """A part more, a part less, one of another name, parts in another order."""
    upload, random = case.reply.upload, case.random
    inner = [path for path, _ in _leaves(upload)]
    inside = random.choice(inner)[:-1] if inner else ()

    def change(part):
        names = [key for key in part if key not in OPTIONAL]
        how = random.randrange(4)
        if how == 0 or not names:
            return part | {
                random.choice(["evil", "__class__", "\ud800", "model.x"]): random.choice([1, torch.zeros(3)])
            }
        if how == 1 and len(names) > 1:
            gone = random.choice(names)
            return {key: value for key, value in part.items() if key != gone}
        if how == 2 and len(names) > 1:
            return dict(reversed(part.items()))
        other = random.choice(names)
        return {key + "x" if key == other else key: value for key, value in part.items()}

    return changed(case, upload=_with(upload, inside, change))


def too_many(case):
    """More pictures of a class than the recipe allows, or pictures of a class that the task does not have."""
    upload, random = case.reply.upload, case.random
    images, labels = (upload.get("images"), upload.get("labels")) if isinstance(upload, dict) else (None, None)
    if images is None or not len(labels):
        return changed(case, upload={"images": torch.zeros(1, 3, 32, 32), "labels": torch.tensor([0])})
    if random.random() < 0.5:
        return changed(case, upload=upload | {"images": images.repeat(11, 1, 1, 1), "labels": labels.repeat(11)})
    return changed(case, upload=upload | {"labels": labels + random.choice([1000, -1000])})


def odd_notes(case):
    """Numbers for the log that are none."""
    upload = case.reply.upload
    notes = [3, None, [], torch.zeros(3), {"num_fallbacks": -1}, {"num_withheld": 0.5}, {"num_declined": float("nan")},
             {"num_x": 1 << 60}, {"loss": 10**400}, {"loss": 1e300}, {"loss": "1"}, {"loss": True}, {"loss": None}, {"<i>": 1.0},
             {"": 1.0}, {"a" * 99: 1.0}, {"\ud800": 1.0}, {f"a{k}": 1.0 for k in range(99)}, {"a": {"b": 1.0}}]  # fmt: skip
    return changed(case, upload=upload | {"notes": case.random.choice(notes)} if isinstance(upload, dict) else None)


def bad_statistics(case):
    """A running variance below zero: its square root would spoil the model for everybody."""
    model = case.reply.upload.get("model") if isinstance(case.reply.upload, dict) else None
    names = [name for name in model or () if name.endswith("running_var")]
    if not names:
        return b"nothing"
    name = case.random.choice(names)
    return changed(case, upload=case.reply.upload | {"model": model | {name: -model[name] - 1}})


KINDS = (
    flipped, cut, longer, spliced, noise, foreign, lying_header, odd_header, false_identity, replayed, stolen, odd_reply,
    odd_upload, odd_notes, wrong_value, wrong_keys, too_many, bad_statistics,
)  # fmt: skip


class FloodedPost(LocalPost):
    """Before each honest answer of a site come ``per_answer`` hostile ones in its name."""

    def __init__(self, folders, per_answer, seed=0):
        super().__init__(folders)
        self.per_answer, self.random, self.seen = per_answer, Random(seed), []
        self.honest, self.left, self.kinds, self.asked = (
            {},
            {},
            dict.fromkeys((kind.__name__ for kind in KINDS), 0),
            set(),
        )
        self.delivered = self.asked_again = 0

    def push(self, letters):
        ids = super().push(letters)
        for letter in letters.values():
            self.asked_again += letter.head in self.honest
        return ids

    def pull(self, ids):
        found = {}
        for number in sorted(ids):
            node, letter, _ = self.sent[number]
            if letter.head not in self.honest:
                request = unpack_message(letter.head).tree
                self.honest[letter.head] = self.sites[node].answer(letter)
                self.left[letter.head] = 0 if request.verb == HELLO else self.per_answer
                self.asked.add(request.verb)
                if request.verb != HELLO:
                    self.seen = [*self.seen[-30:], self.honest[letter.head]]
            found[number] = self.honest[letter.head]
            if self.left[letter.head]:
                self.left[letter.head] -= 1
                self.delivered += 1
                kind = KINDS[self.delivered % len(KINDS)]
                self.kinds[kind.__name__] += 1
                found[number] = kind(Case(found[number], self.seen, self.random))
        return found
