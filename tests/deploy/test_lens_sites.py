"""A lens across sites: a server without an image builds the network of its sites, and all see the same."""

import json
import stat

import pytest
import torch
import yaml
from local_sites import TINY, LocalPost, across, changed, events, hashes, in_process, sites
from own_sites import NAMES, own_sites, plan_of, run_plan, write_images

from rescene.config import resolve
from rescene.core.errors import DataError, RunError
from rescene.data import load
from rescene.deploy.checks import check_site
from rescene.deploy.message_bytes import unpack_message
from rescene.deploy.site import Site
from rescene.deploy.trial import try_round
from rescene.engine.experiment import prepare
from rescene.lens import lens as lenses
from rescene.lens.features import LeavesLens
from rescene.lens.lens import open_lens, write_lens
from rescene.use import open_model

LENS = ["model.name=mlp", "model.width=16", "model.lens=waves", "train.augment=false"]
SUMS = ["method.start=coloured", "method.num_steps=0", "privacy.mechanism=release", "privacy.noise_multiplier=0.2",
        "privacy.threshold=1", "privacy.send=sums", "privacy.pool=true", "privacy.mean_grid=4", "privacy.covariance_grid=2",
        "privacy.covariance_colour=true", "privacy.noise=seeded", "tasks.limit=2", "train.server_epochs=2"]  # fmt: skip


def test_the_same_bits_as_in_one_process(tmp_path):
    images = write_images(tmp_path / "images", dict.fromkeys(NAMES, 30))  # few: every site looks at all of them
    resolved = resolve("smoke", [*TINY, *LENS, *SUMS, f"data.path={images}", "data.image_size=16"])
    expected = in_process(resolved, tmp_path / "here")
    data = {"path": str(images), "image_size": 16}
    found = across(resolved, tmp_path / "there", LocalPost(sites(tmp_path, data=data)))
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here") and found["aa"] == expected["aa"]


def test_sites_with_images_of_their_own(tmp_path):
    plan = plan_of((NAMES[:2], 1), (NAMES[2:], 1))
    results = run_plan(plan, tmp_path / "run", own_sites(tmp_path), LENS)
    assert len(results["accuracy_matrix"]) == 2 and results["evaluated"] == "at the sites"
    about = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert about["arch"]["channels"] == 19 and about["picture_size"] == open_model(tmp_path / "run").image_size == 16


SEEN = ["method=moments", "model.name=linear", "model.width=null", "train.augment=false", "privacy.mechanism=release",
        "privacy.epsilon=8", "tasks.limit=1"]  # fmt: skip


def small_lens(path, seed=0):
    made = LeavesLens(widths=(4, 8, 12, 16), num_patches=10, kept={"patches": (6, 4, 4, 2), "stage4": (16,)})
    draw = torch.Generator().manual_seed(seed)
    for value in made.state_dict().values():
        drawn = torch.randn(value.shape, generator=draw)
        value.copy_(drawn.mul(40).round().clamp(-127, 127) if value.dtype == torch.int8 else drawn.abs() * 0.2 + 0.1)
    write_lens(made, "a test", path)
    return str(path)


def test_each_site_opens_its_own_copy_of_a_lens_file(tmp_path, monkeypatch):
    servers, sites_copy = (small_lens(tmp_path / f"{name}.safetensors") for name in ("server", "site"))
    found = own_sites(tmp_path, lens=sites_copy)
    opened = []
    monkeypatch.setattr(
        lenses, "read_lens", lambda path, name, read=lenses.read_lens: opened.append(path) or read(path, name)
    )
    plan = plan_of((NAMES[:2], 1), (NAMES[2:], 1))
    lenses.open_lens.cache_clear()
    results = run_plan(plan, tmp_path / "run", found, [*SEEN, f"model.lens={servers}"])
    assert results["events_summary"]["client_failures"] == 0 and {str(path) for path in opened} == {servers, sites_copy}
    for site in found:
        (kept,) = (site / "state" / "seen").iterdir()
        assert kept.suffix == ".safetensors" and stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("lens", ["other", "none"])
def test_a_site_with_another_lens_or_none_sends_nothing(tmp_path, lens):
    ours, other = small_lens(tmp_path / "ours.safetensors"), small_lens(tmp_path / "other.safetensors", seed=1)
    found = own_sites(tmp_path, lens=ours)
    section = yaml.safe_load((found[2] / "site.yaml").read_text())
    (found[2] / "site.yaml").write_text(yaml.safe_dump(section | {"lens": other if lens == "other" else None}))
    run_plan(plan_of((NAMES, 1)), tmp_path / "run", found, [*SEEN, f"model.lens={ours}"])
    (told,) = [e["message"] for e in events(tmp_path / "run") if e["code"] == "E221"]
    assert open_lens(ours).sha256[:16] in told and "site 2" in told
    assert (open_lens(other).sha256[:16] if lens == "other" else "no lens") in told
    assert not (found[2] / "state").exists(), "it looked at no image and charged nothing"


def test_the_server_does_not_take_a_site_at_its_word(tmp_path):
    """Its greeting names the lens; one that names another is refused, and so is one that is no hash."""
    ours = small_lens(tmp_path / "ours.safetensors")
    for name, code in (("0" * 64, "E221"), ("a line of text", "E342")):

        def change(node, data, name=name):
            upload = unpack_message(data).tree.upload
            greets = isinstance(upload, dict) and "lens" in upload and node == 998
            return changed(data, upload=upload | {"lens": name}) if greets else data

        run, place = tmp_path / code / "run", tmp_path / code
        place.mkdir()
        post = LocalPost(own_sites(place, lens=ours), change=change)
        run_plan(plan_of((NAMES, 1)), run, None, [*SEEN, f"model.lens={ours}"], post=post)
        told = [e["message"] for e in events(run) if e["code"] == code]
        assert told and all("a line of text" not in words for words in told)


def test_images_are_compared_before_the_lens(tmp_path):
    """Features may differ in a byte between a CPU and a GPU; that does not make them other images."""
    images = write_images(tmp_path / "images", dict.fromkeys(NAMES, 4))
    settings = ["data.image_size=16", f"data.path={images}", "device=cpu", *LENS]
    experiment = prepare(resolve("smoke", settings).recipe)
    assert experiment.dataset.pictures == load(path=images, image_size=16).fingerprint()
    assert experiment.dataset.pictures != experiment.dataset.fingerprint()


def test_a_trial_at_a_site_looks_through_its_lens(tmp_path):
    settings = ["method=moments", "model.name=linear", "train.augment=false", "device=cpu", "federation.num_clients=1",
                "federation.per_round=1", "privacy.mechanism=release", "privacy.epsilon=8"]  # fmt: skip
    (folder, *_) = own_sites(tmp_path, lens=small_lens(tmp_path / "ours.safetensors"))
    for lens in ("waves", "/at/the/operator.safetensors"):
        assert try_round(Site.open(folder), resolve("smoke", [*settings, f"model.lens={lens}"])).num_bytes > 0
    (folder, *_) = own_sites(tmp_path)
    with pytest.raises(DataError, match="E222"):
        try_round(Site.open(folder), resolve("smoke", [*settings, "model.lens=/at/the/operator.safetensors"]))


def test_a_trial_sends_the_sums_that_a_run_would_send(tmp_path):
    lens = small_lens(tmp_path / "lens.safetensors")
    folders, settings = own_sites(tmp_path, lens=lens), [*SEEN, f"model.lens={lens}", "device=cpu"]
    found = try_round(Site.open(folders[0]), resolve("smoke", settings))
    assert [one.verb for one in found.answers] == ["client_round", "sum_up"]
    run_plan(plan_of((NAMES, 1)), tmp_path / "run", folders, settings)
    (round_, *_) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    sums = round_["sites"]["0"][0]
    assert sums < found.answers[1].num_bytes < sums + 2000  # the envelope


def test_a_trial_says_that_a_run_would_go_on_without_the_site(tmp_path):
    lens = small_lens(tmp_path / "lens.safetensors")
    (folder, *_) = own_sites(tmp_path, lens=lens, privacy={"epsilon_max": 8, "min_sigma": 50.0})
    with pytest.raises(RunError, match="E376") as error:
        try_round(Site.open(folder), resolve("smoke", [*SEEN, f"model.lens={lens}", "device=cpu"]))
    assert "below its floor 50" in error.value.why and "floor" in error.value.fix


def test_the_check_of_a_site_names_its_lens(tmp_path):
    (folder, *_) = own_sites(tmp_path, lens=small_lens(tmp_path / "ours.safetensors"))
    lens = open_lens(str(tmp_path / "ours.safetensors"))
    (found,) = [row for row in check_site(folder) if row["check"] == "lens"]
    assert lens.sha256[:16] in str(found) and "made from a test" in str(found)
    (tmp_path / "ours.safetensors").unlink()
    lenses.open_lens.cache_clear()
    (found,) = [row for row in check_site(folder) if row["check"] == "lens"]
    assert "E118" in found["problem"]


def test_a_run_reads_what_a_check_of_the_site_saw(tmp_path, monkeypatch, capsys):
    lens, looked = small_lens(tmp_path / "lens.safetensors"), []
    found = own_sites(tmp_path, lens=lens)
    for folder in found:
        section = yaml.safe_load((folder / "site.yaml").read_text())
        section["data"]["image_size"] = 16
        (folder / "site.yaml").write_text(yaml.safe_dump(section))
    monkeypatch.setattr(
        lenses, "_looked", lambda *args, look=lenses._looked: looked.append(len(args[1])) or look(*args)
    )
    for folder in found:
        trial = try_round(Site.open(folder), resolve("smoke", [*SEEN, f"model.lens={lens}", "device=cpu"]))
        assert [one.verb for one in trial.answers] == ["client_round", "sum_up"], "sums are asked for by their own verb"
        (kept,) = (folder / "state" / "seen").iterdir()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        assert [path.name for path in (folder / "state").iterdir()] == ["seen"], "nothing was spent or remembered"
    assert sum(looked) == 110 and "privacy floor" not in capsys.readouterr().err, "a trial sets none"
    looked.clear()
    results = run_plan(plan_of((NAMES, 1)), tmp_path / "run", found, [*SEEN, f"model.lens={lens}"])
    assert sum(looked) == 0 and results["events_summary"]["client_failures"] == 0
