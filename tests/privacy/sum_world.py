"""Parties of a secure sum in one process, with messages that can be lost or changed on their way."""

import torch
from cryptography.hazmat.primitives.asymmetric import ec

from rescene.deploy import summing
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.methods.upload_schema import check_form, fields, tensor
from rescene.privacy import secure_sum as sums

FORM = fields({"a": tensor(torch.int32, 1000), "b": tensor(torch.int64, 3, 7)})
KEYS = "keys"
SIGNING = [ec.generate_private_key(ec.SECP384R1()) for _ in range(10)]


def numbers(client, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + client)
    a = torch.randint(-(2**26), 2**26, (1000,), dtype=torch.int32, generator=generator)
    return {"a": a, "b": torch.randint(-(2**58), 2**58, (3, 7), generator=generator)}


class World:
    """``lost(step, client)``: it does not answer; ``change(step, client, payload or upload)``: what it gets or says."""

    def __init__(
        self, num=10, least=7, values=numbers, session="s", lost=lambda step, client: False, change=None, form=FORM
    ):
        self.session, self.least, self.lost, self.form, self.told = session, least, lost, form, []
        self.change, self.values = change or (lambda step, client, upload: upload), values
        self.verify = sums.verifier({k: SIGNING[k].public_key() for k in range(num)})
        self.parties = {k: self.begin(k) for k in range(num)}

    def begin(self, client):
        return sums.begin(self.session, client, self.least, self.values(client), sums.signer(SIGNING[client]))

    def hold(self):
        keys = {k: sums.keys_of(party) for k, party in self.parties.items() if not self.lost(KEYS, k)}
        keys = {k: self.change(KEYS, k, key) for k, key in keys.items()}
        note = lambda level, code, words, client=None: self.told.append((code, client))  # noqa: E731
        one = summing.Sum(self.session, self.least, self.verify, self.ask, lambda step, clients: list(clients), note)
        return one.hold(keys, self.form)

    def ask(self, step, payloads, form):
        found = {}
        for client, payload in payloads.items():
            upload = self.one(step, client, unpack_message(pack_message(payload).data).tree)
            if not self.lost(step, client):
                found[client] = self.change(step, client, upload)
                check_form(form, found[client])
        return found

    def one(self, step, client, payload):
        """A site's answer; its party is kept as its file would be."""
        sign = sums.signer(SIGNING[client])
        party, upload = summing.answer(
            self.parties[client], lambda: self.values(client), step, payload, sign, self.verify
        )
        self.parties[client] = unpack_message(pack_message(party).data).tree
        return upload
