"""What leaves a site beside the noise: nothing. Every field of its replies, its errors, and requests that lie."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml
from local_sites import LocalPost, events
from own_sites import NAMES, own_sites, plan_of, run_plan, write_images
from test_floors import RELEASE, ledger, limit

from rescene.deploy.exchange import Letter
from rescene.deploy.message_bytes import pack_message, unpack_message
from rescene.deploy.site import Site

EVERYBODY = ["federation.per_round=3", "federation.quorum=0"]
REPLAY = ["method=refed", "model.norm=group", "privacy.mechanism=dp-sgd", "privacy.delta=1e-3", "privacy.epsilon=8"]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Letters of a run with one round of mechanism `release`, its sites, and its folder."""
    root = tmp_path_factory.mktemp("sums")
    folders = own_sites(root)
    post = LocalPost(folders)
    run_plan(plan_of((NAMES[:2], 1), (NAMES[2:], 1)), root / "run", folders, [*RELEASE, *EVERYBODY], post)
    return letters_of(post), root


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    """The same of a method whose memory holds images."""
    pytest.importorskip("opacus", reason="rescene[privacy]")
    root = tmp_path_factory.mktemp("replays")
    folders = own_sites(root)
    post = LocalPost(folders)
    run_plan(plan_of((NAMES, 1)), root / "run", folders, [*REPLAY, *EVERYBODY], post)
    return letters_of(post)


def letters_of(post):
    """Verb -> the first letter with it, and what it asks."""
    found = {}
    for letter in post.letters:
        request = unpack_message(letter.head).tree
        found.setdefault(request.verb, (letter, request))
    return found


def new_site(root, counts, site=0, **more):
    root.mkdir(exist_ok=True)
    images = write_images(root / "images", counts, site=site)
    section = {"client": 0, "device": "cpu", "holds": "own", "data": {"path": str(images)}, "hold_out": 0.3}
    (root / "site.yaml").write_text(yaml.safe_dump(section | more))
    return root


def ask(folder, asked, body=None, **changes):
    """What the site replies to this letter after ``changes`` to what it asks."""
    letter, request = asked
    changes = {"state": None, "token": "t", "ledger": None} | changes
    head = pack_message(replace(request, **changes)).data
    data = Site.open(folder).answer(Letter(head, letter.body if body is None else body))
    return unpack_message(data).tree, len(data)


def books(folder):
    path = folder / "state" / "ledger.jsonl"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize("verb", ["client_round", "set_aside"])
def test_one_image_more_changes_nothing_beside_the_noise(replays, tmp_path, verb):
    told = []
    for count in (10, 11, 0):
        counts = {"bee": 9, "cat": 9, "dog": 9} | ({"ant": count} if count else {})
        folder = new_site(tmp_path / str(count), counts)
        reply, num_bytes = ask(folder, replays[verb])
        assert reply.problem is None and reply.flops == 0
        assert reply.state.num_bytes == 0
        (memory,) = (folder / "state").glob("*/client-0/memory-*.bin")
        assert memory.stat().st_size > 1000 or verb == "client_round"
        for kept in (folder / "state").glob("*/client-0/answer-*.bin"):
            kept.unlink()
        again, _ = ask(folder, replays[verb])
        assert again.state == reply.state, "the same question has the same handle"
        told.append((num_bytes, reply.told, reply.ledger and reply.ledger.entries))
    assert len(set(told)) == 1


def test_the_handle_of_a_memory_depends_on_the_site_and_the_question_alone(replays, tmp_path):
    here = new_site(tmp_path / "here", dict.fromkeys(NAMES, 9))
    first, _ = ask(here, replays["set_aside"])
    secret = (here / "state" / "ledger" / "secret").read_bytes()
    there = new_site(tmp_path / "there", dict.fromkeys(NAMES, 12), site=5)  # other images, the same secret
    (there / "state" / "ledger").mkdir(parents=True)
    (there / "state" / "ledger" / "secret").write_bytes(secret)
    assert ask(there, replays["set_aside"])[0].state == first.state
    (there / "state" / "ledger" / "secret").write_bytes(bytes(32))
    assert ask(there, replays["set_aside"], token="u")[0].state != first.state
    after, _ = ask(here, replays["client_round"], state=first.state.sha256, token="w")
    assert after.problem[0] == "E375", "the memory is found under its handle, and its images are not used twice"


LIES = {
    "task -1": {"task": -1},
    "task -2": {"task": -2},
    "task 2 of 2": {"task": 2},
    "task True": {"task": True},
    "task as text": {"task": "0"},
    "task 0.0": {"task": 0.0},
    "round 1 of 1": {"round": 1},
    "no round": {"round": -1},
    "round -2": {"round": -2},
    "no such verb": {"verb": "steal"},
    "a method's own function": {"verb": "server_round"},
    "no word": {"verb": 7},
    "a memory elsewhere": {"state": "../../site.yaml"},
    "an address of lists": {"address": (["client"],)},
    "an end that is none": {"ledger": "7"},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_request_outside_the_plan_is_refused_and_the_ledger_stays_as_it_is(sums, tmp_path, lie):
    letters, root = sums
    folder = tmp_path / "site-0"
    shutil.copytree(root / "site-0", folder)
    before = books(folder)
    reply, _ = ask(folder, letters["client_round"], **LIES[lie])
    assert reply.problem is not None and reply.problem[0] in ("E374", "E346", "E340")
    assert books(folder) == before and before


def test_another_name_of_a_run_buys_no_fresh_release(sums, tmp_path):
    """Without a floor, the first run's epsilon is the limit; the same images under another name are beyond it."""
    letters, root = sums
    folder = tmp_path / "site-0"
    shutil.copytree(root / "site-0", folder)
    ask(folder, letters["client_round"], run="another")  # the plan promised two rounds, and one was held
    before = len(ledger(folder))
    reply, _ = ask(folder, letters["client_round"], run="third")
    assert [code for code, _ in reply.told] == ["W310"] and len(ledger(folder)) == before
    (folder / "state" / "floor.yaml").write_text("epsilon_max: 50")
    reply, _ = ask(folder, letters["client_round"], run="third", token="v")
    assert not reply.told and len(ledger(folder)) == before + 2


def test_after_a_promise_nothing_is_sent_without_a_mechanism(sums, tmp_path):
    letters, root = sums
    folder = tmp_path / "site-0"
    shutil.copytree(root / "site-0", folder)
    recipe = json.loads(letters["client_round"][1].recipe)
    plain = json.dumps(recipe | {"privacy": {"mechanism": "none"}})
    reply, _ = ask(folder, letters["client_round"], run="plain", recipe=plain)
    assert reply.problem[0] == "E413" and "no mechanism" in reply.problem[1]


def test_a_site_without_an_image_of_the_plan_answers_as_the_others_do(sums, tmp_path):
    letters, _ = sums
    replies = []
    for name, counts in {
        "none": {"yak": 5, "zebra": 5},
        "one": {"ant": 1, "yak": 5},
        "many": dict.fromkeys(NAMES, 9),
    }.items():
        folder = new_site(tmp_path / name, counts)
        hello, size = ask(folder, letters["hello"])
        assert hello.problem is None and hello.told == (), "no class of its own is named"
        reply, num_bytes = ask(folder, letters["client_round"])
        assert reply.problem is None
        replies.append((size, reply.flops, reply.state, reply.told, reply.ledger.entries))
    assert len(set(replies)) == 1


def test_errors_behind_a_mechanism_are_a_code_and_constant_words(sums, tmp_path):
    letters, _ = sums
    folder = new_site(tmp_path / "site", {"ant": 3, "secret-name": 3}, labels={"secret-nme": "ant"})
    for verb in ("hello", "client_round"):
        reply, _ = ask(folder, letters[verb])
        assert reply.problem == ("E378", "the site cannot do this; its own log says why")
    folder = new_site(tmp_path / "other", {"ant": 3, "secret-name": 3})
    reply, _ = ask(folder, letters["client_round"], body=pack_message({"model": {}}).data)
    assert reply.problem == ("E378", "the site cannot do this; its own log says why")


def test_another_version_is_told_from_a_recipe_with_new_keys(sums, tmp_path):
    letters, root = sums
    recipe = json.dumps(json.loads(letters["hello"][1].recipe) | {"new_key": 1})
    reply, _ = ask(root / "site-0", letters["hello"], version="99.0", recipe=recipe)
    assert reply.problem[0] == "E343" and "99.0" in reply.problem[1]


def test_evaluation_is_declined_behind_a_mechanism(sums, tmp_path):
    """Exact counts of a hold-out tell for any weights whether an image is there."""
    _, root = sums
    told = [event for event in events(root / "run") if event["client"] is not None and "evaluation" in event["message"]]
    assert {event["code"] for event in told} == {"E413"}
    assert not any(row["charge"]["mechanism"] == "evaluation" for row in ledger(root / "site-0") if "charge" in row)


def test_evaluation_that_a_floor_allows_is_noised_charged_and_given_once(sums, tmp_path):
    letters, _ = sums
    folder = new_site(tmp_path / "site", dict.fromkeys(NAMES, 20))
    limit(folder, epsilon_max=3.0, evaluation_sigma=4.0)
    counts = []
    for token in ("a", "b"):
        reply, _ = ask(folder, letters["evaluate"], token=token)
        assert reply.problem is None and reply.flops == 0 and reply.told[0][0] == "W374"
        counts.append(reply.upload["tally"].num.tolist())
    assert counts[0] == counts[1], "asked again, the same counts"
    (charge,) = [row["charge"] for row in ledger(folder) if row["kind"] == "intent"]
    assert charge["mechanism"] == "evaluation" and charge["sigma"] == 4.0 and charge["images"]
    done = 1
    for name in range(20):
        reply, _ = ask(folder, letters["evaluate"], run=f"run-{name}", token=f"t{name}")
        done += reply.problem is None
    assert 1 < done < 10 and reply.problem[0] == "E413", "until the images' budget is spent"


def test_a_run_behind_a_mechanism_says_that_sites_do_not_tell_their_work(sums):
    _, root = sums
    results = json.loads((root / "run" / "results.json").read_text())
    measured = results["cost"]["measured"]
    assert "cost.client" in results["not_measured"]
    assert measured["client_flops"] is None and measured["client_state_bytes"] is None and measured["uplink_bytes"] > 0
