"""Every error code of the source is in the index, and means one thing."""

from collections import defaultdict
from functools import cache

from generate import errors

# Codes that two layers use for the same thing. Any other code that two layers use has two meanings: give one a new number.
SHARED = {
    "E103": "a method that is not known, or an object that is none",
    "E104": "a value that is not possible",
    "E105": "settings that cannot be read",
    "E106": "an override or a list on the command line that cannot be read",
    "E111": "a name that a method cannot have, or none",
    "E119": "more runs at a time, or other GPUs, than this machine has",
    "E140": "a table format that is not known",
    "E145": "a figure whose kind is not named or not known",
    "E152": "a document without a place for a table",
    "E171": "a noise multiplier that is not possible",
    "E174": "a package of the extra `privacy` that is not installed",
    "E201": "a path with nothing there",
    "E203": "images that cannot be read",
    "E213": "a folder without a readable run",
    "E223": "a package of an extra that is not installed, or does not load",
    "E224": "a network of timm, or a lens made of one, that there is not",
    "E321": "a site that failed",
    "E408": "a folder without a finished run",
    "E413": "a site that declines for privacy",
    "E441": "a site that lied about a key, a share or a signature of a secure sum",
    "E442": "a question of a secure sum that is repeated differently, out of order or of another sum",
    "E443": "numbers that would leave a site without enough others in the sum",
    "E444": "numbers that are of another secure sum",
    "E445": "a secure sum that the server does not finish",
}
FAMILY = {
    "E1": "ConfigError",
    "E2": "DataError",
    "E3": "RunError",
    "E4": "RunError",
    "E5": "ConfigError",
    "W": "ResceneWarning",
}
OTHER_STATUS = {
    "E207",
    "E208",
    "E199",
}  # settings about data end with the recipe's status; an audit's lack of images with theirs


@cache
def all_uses():
    return tuple(errors.uses())


def by_code(attribute):
    found = defaultdict(set)
    for use in all_uses():
        found[use.code].add(getattr(use, attribute))
    return found


def test_every_code_in_the_source_is_in_the_index():
    page = errors.page()
    assert len(errors.mentioned()) > 100
    assert not [code for code in errors.mentioned() if f"\n### {code}\n" not in page]


def test_a_code_means_one_thing():
    assert {code: layers for code, layers in by_code("layer").items() if len(layers) > 1 and code not in SHARED} == {}
    kinds = {code: found - {"event"} for code, found in by_code("kind").items()}
    assert {code: found for code, found in kinds.items() if len(found) > 1} == {}


def test_the_number_tells_the_exit_status():
    wrong = {
        use.code: use.kind
        for use in all_uses()
        if use.kind not in ("event", "Declined") and use.code not in OTHER_STATUS
        and not any(use.code.startswith(prefix) and use.kind == kind for prefix, kind in FAMILY.items())
    }  # fmt: skip
    assert wrong == {}


def test_a_message_is_read_as_a_person_sees_it(tmp_path):
    (tmp_path / "one.py").write_text(
        'NONE = "E901"\n'
        "def f(name, close):\n"
        '    what = f"unknown {name!r}"\n'
        '    raise ConfigError("E900", what + (f"; {close}?" if close else ""), fix="rescene list")\n'
        "def g(self):\n"
        '    self.note("error", NONE, f"site {self.client} failed")\n'
        'KEPT = ("E900", "E901")\n'
    )
    first, second = errors.uses(tmp_path)
    assert (first.kind, first.message, first.fix, first.line) == ("ConfigError", "unknown ⟨name⟩", "rescene list", 4)
    assert (second.code, second.kind, second.message) == ("E901", "event", "site ⟨client⟩ failed")
