"""A bank on disk and on the hub: whole, of the right model, or refused."""

import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from families import build
from layerleap.errors import (
    BadArtifact,
    BadSettings,
    CannotFetch,
    CannotWrite,
    NotFinite,
    WrongModel,
)
from layerleap.maps import artifact
from layerleap.maps.artifact import BANK, config_hash
from layerleap.maps.bank import CONFIG, WEIGHTS, ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import FitReport, LinearMap, LowRankMap
from layerleap.maps.map import IdentityMap, Map
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def bank(llama):
    return fit(llama, sentences(40), intercept=True)


@pytest.fixture
def saved(bank, tmp_path):
    return bank.save_pretrained(tmp_path / "bank")


def small_bank(width=4, **changes):
    """A bank of a model that does not exist."""
    maps = [LinearMap(src, 2, weight=torch.randn(width, width)) for src in range(2)]
    model = {"name": "nobody/model", "fingerprint": "ab12" * 8}
    about = {"model": model, "n_layers": 2, "d_model": width}
    return ShortcutBank(maps, **{**about, **changes})


def assert_equal_banks(actual, expected):
    assert actual.maps.keys() == expected.maps.keys()
    for pair, shortcut in expected.maps.items():
        tensors = actual.maps[pair].tensors()
        assert tensors.keys() == shortcut.tensors().keys()
        for name, value in shortcut.tensors().items():
            assert torch.equal(tensors[name], value)
    for name in ("model", "n_layers", "d_model", "fits", "quality", "source", "settings", "data"):
        assert getattr(actual, name) == getattr(expected, name)


@pytest.mark.parametrize(
    "options",
    [{}, {"intercept": True}, {"rank": 3}, {"rank": 3, "intercept": True}, {"pairs": "all"}],
)
def test_a_loaded_bank_is_bit_identical_to_the_saved_one(llama, tmp_path, options):
    bank = fit(llama, sentences(30), **options)
    loaded = ShortcutBank.from_pretrained(bank.save_pretrained(tmp_path / "bank"))
    assert_equal_banks(loaded, bank)
    assert len(loaded) == (6 if "pairs" in options else 3)
    h = torch.randn(5, llama.d_model)
    assert torch.equal(loaded[0, 3](h), bank[0, 3](h))
    assert loaded[0, 3].rank == options.get("rank", llama.d_model)
    loaded.check_model(llama)


@pytest.mark.parametrize(
    ("options", "settings", "kinds"),
    [
        ({}, {}, {"linear"}),
        ({"rank": 3}, {}, {"low-rank"}),
        ({"pairs": "all"}, {"lens": "tuned"}, {"linear", "tuned"}),
    ],
)
def test_a_bank_saved_without_kinds_is_loaded_by_the_names_of_its_tensors(
    llama, tmp_path, options, settings, kinds
):
    bank = fit(llama, sentences(30), **options)
    bank = bank.changed(settings={**bank.settings, **settings})
    config = bank._config()
    del config["kinds"]
    for one in config["fits"]:
        one["train_r2_id"] = one.pop("train_r2_logit")
    BANK.save(tmp_path / "bank", config, bank._tensors(), "")
    loaded = ShortcutBank.from_pretrained(tmp_path / "bank")
    assert_equal_banks(loaded, bank)
    assert {one.kind for one in loaded.maps.values()} == kinds
    tuned = {one.dst for one in loaded.maps.values() if one.kind == "tuned"}
    assert tuned == ({3} if "tuned" in kinds else set())
    assert loaded.kind == max(kinds)


def test_a_bank_with_scores_keeps_them(tmp_path):
    bank = small_bank(quality=[{"layer": 0, "precision@1 linear": 0.125}], source="somebody")
    loaded = ShortcutBank.from_pretrained(str(bank.save_pretrained(str(tmp_path / "bank"))))
    assert_equal_banks(loaded, bank)


def test_a_folder_holds_three_files_that_others_may_read(saved):
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()}
    mask = os.umask(0)
    os.umask(mask)
    assert files == dict.fromkeys([CONFIG, WEIGHTS, "README.md"], 0o666 & ~mask)
    assert (saved / "README.md").read_text(encoding="utf8").startswith("---\n")


def test_saving_again_replaces_the_whole_folder(bank, saved):
    (saved / "left-over.txt").write_text("old")
    small_bank().save_pretrained(saved)
    assert len(ShortcutBank.from_pretrained(saved)) == 2
    assert not (saved / "left-over.txt").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["bank"]


def test_a_bank_checks_its_model(bank, llama):
    bank.check_model(llama)
    assert bank.lens(llama).bank is bank


def test_other_weights_are_refused(bank):
    with pytest.raises(WrongModel, match="the weights of tiny-llama are"):
        bank.check_model(tiny("llama", seed=1))


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"hidden_size": 32}])
def test_another_shape_is_refused(bank, changes):
    with pytest.raises(WrongModel, match="3 layers of 24"):
        bank.check_model(tiny("llama", **changes))


def test_a_cast_model_is_still_the_same_model(bank):
    model = build("llama")
    cast = Transformer.wrap(model.to(torch.bfloat16), name="tiny-llama", check=False)
    assert bank.check_model(cast) is None  # no WrongModel


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_truncated_weights_are_refused(saved, keep):
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(BadArtifact, match=r"changed or truncated after it was saved"):
        ShortcutBank.from_pretrained(saved)


def test_one_changed_byte_is_refused(saved):
    data = bytearray((saved / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (saved / WEIGHTS).write_bytes(data)
    with pytest.raises(BadArtifact, match=r"sha256 [0-9a-f]{8}, expected [0-9a-f]{8}"):
        ShortcutBank.from_pretrained(saved)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(
        BadArtifact, match=f"has no {name}|{name} is missing; copy the whole folder"
    ):
        ShortcutBank.from_pretrained(saved)


def test_a_readme_may_be_missing(saved, bank):
    (saved / "README.md").unlink()
    assert len(ShortcutBank.from_pretrained(saved)) == len(bank)


def change_config(folder, *, sign=True, **changes):
    """Change what bank.json says; with a hash that fits, as a forger could."""
    config = {**json.loads((folder / CONFIG).read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    if sign:
        config["content_sha256"] = config_hash(config)
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "has format 99; expected format 1"),
        ({"format": None}, "has format None; expected format 1"),
        ({"model": None}, "does not describe a bank"),
        ({"fits": [{"src": 0}]}, "does not describe a bank"),
        ({"fits": 3}, "does not describe a bank"),
        ({"model": {"name": "x"}}, "does not identify its model: no fingerprint"),
        ({"model": {"name": "x", "fingerprint": ""}}, "no fingerprint"),
        ({"model": {"name": "x", "fingerprint": None}}, "no fingerprint"),
        ({"model": {"fingerprint": "ab12"}}, "no name"),
        ({"model": "x"}, "does not describe a bank"),
        ({"sha256": None}, "changed or truncated"),
    ],
)
def test_another_configuration_is_refused(saved, changes, message):
    change_config(saved, **changes)
    with pytest.raises(BadArtifact, match=message):
        ShortcutBank.from_pretrained(saved)


@pytest.mark.parametrize("text", ["", "{", "no json", '{"format": 1'])
def test_broken_json_is_refused(saved, text):
    (saved / CONFIG).write_text(text)
    with pytest.raises(BadArtifact, match="is not valid JSON"):
        ShortcutBank.from_pretrained(saved)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"bank"'])
def test_json_that_is_not_an_object_is_refused(saved, text):
    (saved / CONFIG).write_text(text)
    with pytest.raises(BadArtifact, match=CONFIG):
        ShortcutBank.from_pretrained(saved)


def test_tensors_that_are_not_maps_are_refused(saved):
    from safetensors.torch import save_file

    from layerleap.files import sha256_of

    save_file({"model.embed": torch.zeros(2)}, saved / WEIGHTS)
    change_config(saved, sha256=sha256_of(saved / WEIGHTS))
    with pytest.raises(BadArtifact, match="does not describe a bank"):
        ShortcutBank.from_pretrained(saved)


def test_a_file_that_is_not_safetensors_is_refused(saved):
    from layerleap.files import sha256_of

    (saved / WEIGHTS).write_bytes(b"x" * 100)
    change_config(saved, sha256=sha256_of(saved / WEIGHTS))
    with pytest.raises(BadArtifact, match="is not a safetensors file"):
        ShortcutBank.from_pretrained(saved)


FULL_DISK = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


def failing_at(monkeypatch, where, error):
    """Make one step of saving write something and then fail."""
    write_text = Path.write_text

    def fail(*args, **options):
        if where == "save_file":
            Path(args[1]).write_bytes(b"half")
        elif where == "readme":
            write_text(*args, **options)
            if args[0].name != "README.md":
                return
        raise error

    owners = {"readme": (Path, "write_text"), "save_file": (safetensors.torch, "save_file")}
    target = owners.get(where, (artifact, where))
    monkeypatch.setattr(*target, fail)


@pytest.mark.parametrize("where", ["save_file", "write_json", "readme"])
@pytest.mark.parametrize("error", FULL_DISK, ids=["system", "safetensors"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, where, error):
    failing_at(monkeypatch, where, error)
    with pytest.raises(CannotWrite, match="No space left on device") as caught:
        small_bank().save_pretrained(tmp_path / "bank")
    assert str(tmp_path / "bank") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["save_file", "write_json", "readme"])
@pytest.mark.parametrize("error", [*FULL_DISK, KeyboardInterrupt()], ids=repr)
def test_a_failed_save_leaves_an_earlier_bank_as_it_was(bank, saved, monkeypatch, where, error):
    failing_at(monkeypatch, where, error)
    with pytest.raises((CannotWrite, KeyboardInterrupt)):
        small_bank().save_pretrained(saved)
    monkeypatch.undo()
    assert_equal_banks(ShortcutBank.from_pretrained(saved), bank)
    assert [path.name for path in saved.parent.iterdir()] == ["bank"]


def test_a_bank_is_not_written_over_a_file(tmp_path):
    (tmp_path / "bank").write_text("precious")
    with pytest.raises(CannotWrite, match="is a file; expected a folder"):
        small_bank().save_pretrained(tmp_path / "bank")
    assert (tmp_path / "bank").read_text() == "precious"


def test_a_folder_of_other_things_is_never_replaced(bank, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    for refuse in (BANK.check_target, bank.save_pretrained):
        with pytest.raises(CannotWrite, match=r"other files than a bank.*choose another folder"):
            refuse(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_an_empty_or_new_folder_and_an_earlier_bank_are_fine_targets(bank, tmp_path, saved):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new", "deep/er", "bank"):
        BANK.check_target(tmp_path / name)
        assert len(ShortcutBank.from_pretrained(bank.save_pretrained(tmp_path / name))) == 3


@pytest.mark.parametrize("name", [".", "..", "../here", ""])
def test_the_folder_one_is_in_is_never_replaced(bank, tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CannotWrite, match="is, or contains, the current folder"):
        bank.save_pretrained(name)
    assert (tmp_path / "here").samefile(".")


def test_a_target_below_a_file_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/bank", "file/deep/bank"):
        with pytest.raises(CannotWrite, match="file"):
            BANK.check_target(tmp_path / name)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"ridge": 5.0}},
        {"quality": [{"layer": 0, "precision@1 linear": 1.0}]},
        {"source": "somebody famous"},
        {"content_sha256": None},
        {"content_sha256": "00"},
    ],
    ids=repr,
)
def test_a_card_that_was_changed_is_refused(saved, changes):
    change_config(saved, sign=False, **changes)
    with pytest.raises(BadArtifact, match=r"bank\.json was changed after it was saved"):
        ShortcutBank.from_pretrained(saved)


def test_another_layout_of_the_same_card_is_accepted(saved, bank):
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(dict(reversed(config.items()))))
    assert_equal_banks(ShortcutBank.from_pretrained(saved), bank)


def test_a_bank_without_a_fingerprint_fits_no_model(llama):
    maps = [LinearMap(0, 3, weight=torch.eye(24))]
    nameless = ShortcutBank(maps, model={"name": "x"}, n_layers=3, d_model=24)
    with pytest.raises(WrongModel, match="weights None"):
        nameless.check_model(llama)


def test_a_bank_is_placed_once_where_its_rows_are(bank):
    asked = []
    placed = bank.to(lambda layer: asked.append(layer) or ("meta" if layer else "cpu"))
    assert sorted(asked) == [0, 1, 2]
    where = {pair: {t.device.type for t in m.tensors().values()} for pair, m in placed.maps.items()}
    assert where == {(0, 3): {"cpu"}, (1, 3): {"meta"}, (2, 3): {"meta"}}
    assert placed.maps[0, 3].weight is bank.maps[0, 3].weight
    for name in ("model", "n_layers", "d_model", "fits", "quality", "source", "settings", "data"):
        assert getattr(placed, name) == getattr(bank, name)
    assert bank.maps[1, 3].weight.device.type == "cpu"  # the old bank stays as it was
    assert bank.to(dict.fromkeys(range(3), "cpu")) is bank


def test_a_layer_to_itself_is_the_identity(bank):
    for layer in range(4):
        assert isinstance(bank[layer, layer], IdentityMap)


@pytest.mark.parametrize("pair", [(0, 1), (3, 0), (0, 4), (4, 4), (-1, 3), (-1, -1), (7, 9)])
def test_a_map_that_is_not_there_is_named(bank, pair):
    with pytest.raises(BadSettings) as caught:
        bank[pair]
    assert f"no map from layer {pair[0]} to layer {pair[1]}" in str(caught.value)
    assert "layers 0 to 3, the bank holds every layer to the last" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bank_of_some_pairs_says_how_many(llama):
    maps = [LinearMap(0, dst, weight=torch.eye(24)) for dst in (1, 2)]
    bank = ShortcutBank(maps, model={"name": "x"}, n_layers=3, d_model=24)
    with pytest.raises(BadSettings, match="holds 2 pairs"):
        bank[1, 3]
    assert not bank.is_final_only
    some = ShortcutBank(
        [LinearMap(0, 3, weight=torch.eye(24))], model={"name": "x"}, n_layers=3, d_model=24
    )
    assert not some.is_final_only
    with pytest.raises(BadSettings, match="holds 1 pairs"):
        some[1, 3]
    assert repr(bank) == "ShortcutBank(2 maps of x, 3 layers)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low_rank", [False, True])
def test_a_map_gives_rows_in_the_dtype_they_came_in(dtype, low_rank):
    bias, left, right = torch.randn(6), torch.randn(6, 2), torch.randn(2, 6)
    shortcut: Map = LinearMap(0, 1, torch.randn(6, 6), bias)
    if low_rank:
        shortcut = LowRankMap(0, 1, left, right, bias)
    h = torch.randn(3, 6).to(dtype)
    actual = shortcut(h)
    assert actual.dtype == dtype
    assert actual.device == h.device
    whole = left @ right if low_rank else shortcut.tensors()["weight"]
    expected = h.double() @ whole.double() + bias.double()
    error = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=error, atol=error)


def test_rows_that_leave_the_range_of_float16_are_reported():
    shortcut = LinearMap(2, 5, weight=1000 * torch.eye(6))
    with pytest.raises(NotFinite, match=r"layer 2 to layer 5 exceed .* run the model in bfloat16"):
        shortcut(torch.full((3, 6), 100.0, dtype=torch.float16))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.isfinite(shortcut(torch.full((3, 6), 100.0, dtype=dtype))).all()


def test_a_map_works_on_the_device_of_the_rows():
    actual = LinearMap(0, 1, weight=torch.eye(6), bias=torch.zeros(6))(torch.randn(3, 6).to("meta"))
    assert actual.device.type == "meta"
    moved = LinearMap(0, 1, weight=torch.eye(6), bias=torch.zeros(6)).to("meta")
    assert {value.device.type for value in moved.tensors().values()} == {"meta"}
    assert (moved.src, moved.dst) == (0, 1)


def test_a_map_takes_rows_of_any_shape():
    shortcut = LinearMap(0, 1, weight=torch.randn(6, 6))
    h = torch.randn(2, 5, 6)
    torch.testing.assert_close(shortcut(h)[1], shortcut(h[1]))


def a_fit(src, rank, width=4):
    return FitReport(src, 2, 100, rank, width, 12.5, 0.0, 0.75, -0.5)


def test_the_card_warns_of_rank_deficient_fits():
    card = small_bank(fits=[a_fit(0, 2), a_fit(1, 4)]).card()
    assert "**1 of 2 fits are rank-deficient** (layer 0: rank 2 of 4 from 100 rows)" in card
    assert "| 0 | 100 | 2/4 | 12 | 0 | 0.750 | -0.500 |" in card
    assert "rank-deficient" not in small_bank(fits=[a_fit(0, 4), a_fit(1, 4)]).card()


def test_the_card_shows_held_out_scores_and_how_the_bank_was_made():
    card = small_bank(
        quality=[{"layer": 0, "precision@1 linear": 0.25}],
        data={"text": "novels"},
        settings={"ridge": 0.5, "rank": None},
        source="somebody",
    ).card()
    assert "Scores on held-out text:" in card
    assert "| 0 | 0.250 |" in card
    for line in ("- text: novels", "- ridge: 0.5", "Fitted by somebody."):
        assert line in card
    assert "- rank:" not in card
    assert "base_model: nobody/model" in card


@pytest.mark.parametrize(
    "name", ["./x", "../x", "~/x", "/models/x", "a/b/c", "x", "folder/model", "a b/c", "a/b/"]
)
def test_only_a_name_of_the_hub_is_a_base_model(name, tmp_path, monkeypatch):
    (tmp_path / "folder" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = {"name": name, "fingerprint": "x"}
    assert "base_model" not in small_bank(model=model).card()
    assert "base_model: maker/m-1.5_x" in small_bank(model={"name": "maker/m-1.5_x"}).card()


def test_the_card_says_which_pairs_there_are(llama):
    def kind(*pairs):
        maps = [LinearMap(*pair, weight=torch.eye(4)) for pair in pairs]
        card = ShortcutBank(maps, model={"name": "x"}, n_layers=2, d_model=4).card()
        return re.search(r"\d maps (.*) of x \(2 layers, width 4\)", card)[1]

    assert kind((0, 2), (1, 2)) == "from every layer to the last layer"
    assert kind((0, 1), (0, 2), (1, 2)) == "between all pairs of layers"
    assert kind((0, 2)) == kind((0, 1), (1, 2)) == "between some pairs of layers"


def test_the_card_of_a_bank_without_scores_says_so():
    assert "Not evaluated on held-out text" in small_bank().card()


def test_a_card_of_a_fitted_bank_names_model_text_and_rows(bank):
    card = bank.card()
    assert "# Linear shortcuts for tiny-llama" in card
    assert f"- rows_fitted: {bank.fits[0, 3].rows}" in card
    of_model, of_data = card.split("### Data")
    assert f"- fingerprint: {bank.model['fingerprint']}" in of_model
    assert f"- fingerprint: {bank.data['fingerprint']}" in of_data
    assert "base_model" not in card  # not a hub name


class Hub:
    """A hub of one repository in a folder."""

    def __init__(self, root):
        self.root, self.calls = root, {}

    def api(self, token=None):
        self.calls["token"] = token
        return self

    def create_repo(self, repo_id, **options):
        self.calls["create_repo"] = (repo_id, options)
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls["upload_folder"] = (repo_id, commit_message)
        shutil.copytree(folder_path, self.root / repo_id)

    def snapshot_download(self, repo_id, **options):
        self.calls["snapshot_download"] = (repo_id, options)
        return str(self.root / repo_id)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub

    actual = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", actual.api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", actual.snapshot_download)
    return actual


def test_a_bank_goes_to_the_hub_and_comes_back(bank, hub):
    address = bank.push_to_hub("me/shortcuts", private=True, token="secret")
    assert address == "https://hub.example/me/shortcuts"
    assert hub.calls["token"] == "secret"
    assert hub.calls["create_repo"] == ("me/shortcuts", {"private": True, "exist_ok": True})
    assert hub.calls["upload_folder"] == (
        "me/shortcuts",
        "Upload ShortcutBank(3 maps of tiny-llama, 3 layers)",
    )
    assert {path.name for path in (hub.root / "me/shortcuts").iterdir()} == {
        *(CONFIG, WEIGHTS, "README.md")
    }
    loaded = ShortcutBank.from_pretrained("me/shortcuts", revision="v1", token="other")
    assert_equal_banks(loaded, bank)
    repo, options = hub.calls["snapshot_download"]
    assert repo == "me/shortcuts"
    assert (options["revision"], options["token"]) == ("v1", "other")
    assert sorted(options["allow_patterns"]) == sorted([CONFIG, WEIGHTS, "README.md"])


def test_a_hub_that_fails_is_a_clear_error(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        CannotFetch, match="there is no folder me/shortcuts, and downloading it from the hub failed"
    ) as caught:
        ShortcutBank.from_pretrained("me/shortcuts")
    assert "\n" not in str(caught.value)


def test_without_a_network_a_hub_name_is_a_clear_error(empty_cache):
    with pytest.raises(CannotFetch, match="no folder nobody/at-all"):
        ShortcutBank.from_pretrained("nobody/at-all")


def test_a_name_that_is_neither_folder_nor_repository_is_refused(tmp_path):
    with pytest.raises(BadArtifact, match="neither a folder nor a valid name"):
        ShortcutBank.from_pretrained(tmp_path / "nothing" / "here")
