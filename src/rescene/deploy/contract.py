"""What the server takes from a site: an answer to the very question it asked, exactly as it asked for it, and nothing else.

The header is read and matched before memory is taken for the values, then the values. Whatever does not fit is refused with
a code, and the words of the refusal are ours: nothing of what came is repeated in a log.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rescene.core.errors import RunError
from rescene.core.record import Tree
from rescene.deploy.exchange import LONGEST_LINE, Remembered, Reply
from rescene.deploy.message_bytes import unpack_message
from rescene.engine.evaluate import Tally
from rescene.methods.upload_schema import MOST, Form, Misfit, Sizes, both, check_form, fields, tensor, whole
from rescene.privacy.ledger import End

HEADER_BYTES, TENSOR_BYTES = 1 << 16, 512  # of JSON, which takes a hundred times its size while it is read
MOST_TOLD = 20
CODE, DIGEST = re.compile(r"[EW]\d{3}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Question:
    """What one site was asked. ``client`` is None where we ask who it is; ``decode`` turns coded pictures into values.

    An answer has hardly more tensors than the payload, so ``num_tensors`` of that bound its header.
    """

    token: str
    client: int | None
    form: Form
    decode: Callable[[Tree], Tree] | None = None
    num_tensors: int = 0


def open_reply(data: bytes, question: Question) -> Reply:
    """The reply, if it is one to this question. RunError E340 (no message), E342 (does not fit), E364 (another question)."""
    limit = HEADER_BYTES + TENSOR_BYTES * question.num_tensors
    try:
        reply: Reply = unpack_message(data, header_limit=limit, look=lambda tree: _check(tree, question)).tree
        _check(reply, question)
        if question.decode is not None and reply.problem is None:
            check_form(question.form, question.decode(reply.upload))
        return reply
    except RunError:
        raise
    except Misfit as misfit:
        raise RunError("E342", f"the answer does not fit: {misfit}") from None
    except Exception as error:  # a plug-in's form may not expect everything; a stranger's bytes never stop the run
        raise RunError("E340", f"the message is refused: it cannot be read ({type(error).__name__})") from None


def _check(reply: Any, question: Question) -> None:
    if not isinstance(reply, Reply):
        raise RunError("E340", "the message is refused: it is no reply")
    token = reply.token
    if not isinstance(token, str) or not token.isascii() or not hmac.compare_digest(token, question.token):
        raise RunError("E364", "the answer is to another question, or from another site")
    low, high = (0, MOST) if question.client is None else (question.client, question.client)
    whole(low, high)(reply.client, "its number", {})
    whole()(reply.flops, "flops", {})
    if not isinstance(reply.told, tuple) or len(reply.told) > MOST_TOLD or not all(map(_is_told, reply.told)):
        raise Misfit("what it tells is no list of codes and words")
    if reply.problem is not None:
        rest = (reply.upload, reply.state, reply.ledger)
        if not _is_told(reply.problem) or any(part is not None for part in rest):
            raise Misfit("its problem is no code with words")
        return
    if reply.ledger is not None:
        if not isinstance(reply.ledger, End) or not _matches(DIGEST, reply.ledger.head):
            raise Misfit("the end of its privacy ledger is not named by a hash")
        whole(1, MOST)(reply.ledger.entries, "the length of its privacy ledger", {})
    state = reply.state
    if state is not None:
        if not isinstance(state, Remembered) or not _matches(DIGEST, state.sha256):
            raise Misfit("its memory is not named by a hash")
        whole()(state.num_bytes, "the size of its memory", {})
    check_form(question.form, reply.upload)


def _is_told(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and _matches(CODE, pair[0]) and _is_line(pair[1])


def _is_line(words: Any) -> bool:
    return isinstance(words, str) and words.isprintable() and len(words) <= LONGEST_LINE


def _matches(pattern: re.Pattern[str], words: Any) -> bool:
    return isinstance(words, str) and pattern.fullmatch(words) is not None


def _line(value: Any, name: str, sizes: Sizes) -> None:
    if not _is_line(value):
        raise Misfit(f"{name} is not a line of text")


def _lens(value: Any, name: str, sizes: Sizes) -> None:
    if value != "" and not _matches(DIGEST, value):
        raise Misfit(f"{name} is not named by a hash")


GREETING: Form = fields({"fingerprint": _line, "torch": _line, "lens": _lens})


def tally_form(num_classes: int) -> Form:
    """Counts per class of a hold-out; no more right answers than images."""
    counts = tensor(torch.int64, num_classes, low=0, high=MOST)

    def check(value: Any, name: str, sizes: Sizes) -> None:
        if not isinstance(value, Tally):
            raise Misfit(f"{name} holds no counts")
        for part in (value.num, value.right, value.right_within):
            counts(part, name, sizes)

    def holds(found: Tally) -> bool:
        return bool(((found.right <= found.num) & (found.right_within <= found.num)).all())

    return fields({"tally": both(check, holds, "has more right answers than images")})
