"""From `--model` to a family."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from bench import families_checkpoint
from engine.models import load_family, published
from engine.models.prepare import PrepareError


@pytest.fixture(scope="module")
def omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families_checkpoint.write("qwen2.5-omni-7b", tmp_path_factory.mktemp("omni"))


@pytest.mark.parametrize("name", ["qwen2.5-omni-3b", "qwen3-omni-30b-a3b"])
def test_the_family_is_recognised_from_the_checkpoint(name, cache_dir, tmp_path: Path):
    changes = {"thinker_config": {"torch_dtype": "float32"}}
    family = load_family(str(families_checkpoint.write(name, tmp_path, changes)), cache_dir)
    assert family.info.name == name
    assert type(family).__name__ == ("Qwen3Omni" if name.startswith("qwen3") else "Qwen25Omni")
    assert family.engine_recipe().dtype == "float32"  # the checkpoint's own


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path, cache_dir):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM, which is not served here; known .*Qwen2_5OmniModel"
    ):
        load_family(str(tmp_path), cache_dir)


def test_a_directory_without_a_model(tmp_path: Path, cache_dir):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_family(str(tmp_path), cache_dir)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_family(str(tmp_path), cache_dir)


def test_a_directory_that_is_not_there(cache_dir):
    with pytest.raises(PrepareError, match="no such directory"):
        load_family("/no/such/place", cache_dir)


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch, cache_dir):
    def fail(*args, **kwargs):
        raise OSError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(PrepareError) as caught:
        load_family("Qwen/Qwen2.5-Omni-7B", cache_dir)
    assert "no route to host" in str(caught.value)
    assert "--model /path/to/Qwen2.5-Omni-7B" in str(caught.value)


def test_a_hub_name_is_downloaded_without_what_nobody_reads(monkeypatch, tmp_path: Path):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert published.find("Qwen/Qwen2.5-Omni-7B") == tmp_path
    assert asked["name"] == "Qwen/Qwen2.5-Omni-7B"
    assert "*.safetensors" in asked["allow_patterns"] and "*.json" in asked["allow_patterns"]


COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path: Path, omni_dir: Path) -> Path:
    """The Hub client's own cache of one checkpoint, in two commits, and no network."""
    from huggingface_hub import constants

    repo = tmp_path / "models--Qwen--Qwen2.5-Omni-7B"
    for commit, refs in ((COMMIT, ["main"]), (OTHER, ["v1.0", "refs/pr/3"])):
        (repo / "snapshots").mkdir(parents=True, exist_ok=True)
        (repo / "snapshots" / commit).mkdir()
        for path in omni_dir.iterdir():
            (repo / "snapshots" / commit / path.name).symlink_to(path)
        for ref in refs:
            (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
            (repo / "refs" / ref).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo / "snapshots"


@pytest.mark.parametrize(
    "revision,commit",
    [("", COMMIT), ("@main", COMMIT), ("@v1.0", OTHER), ("@refs/pr/3", OTHER), (f"@{OTHER}", OTHER)],
)
def test_a_revision_is_resolved_and_its_commit_is_told(hub: Path, cache_dir, caplog, revision, commit):
    """A commit needs no telling: it is what was asked for."""
    model = f"Qwen/Qwen2.5-Omni-7B{revision}"
    with caplog.at_level(logging.INFO, "engine.models.published"):
        family = load_family(model, cache_dir)
    assert family.info.checkpoint == f"Qwen/Qwen2.5-Omni-7B@{commit}"
    assert family.engine_recipe().model_dir == hub / commit  # vLLM reads a directory: no other revision
    told = [record.getMessage() for record in caplog.records]
    expected = f"{model} is Qwen/Qwen2.5-Omni-7B@{commit}: --model with that name keeps to it"
    assert told == ([] if revision == f"@{OTHER}" else [expected])


def test_a_revision_that_is_not_there(hub: Path, cache_dir):
    with pytest.raises(PrepareError, match=r"Qwen/Qwen2\.5-Omni-7B@nope could not be downloaded: .*revision"):
        load_family("Qwen/Qwen2.5-Omni-7B@nope", cache_dir)


@pytest.mark.parametrize("revision", ["", "a b", "a@b", "../x", "-x", "main/", "v1:2"])
def test_a_malformed_revision_is_refused_before_anything_is_fetched(monkeypatch, cache_dir, revision):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(PrepareError, match="behind the @ stands a branch, a tag or a commit") as caught:
        load_family(f"Qwen/Qwen2.5-Omni-7B@{revision}", cache_dir)
    assert repr(revision) in str(caught.value)


def test_a_directory_may_have_an_at_in_its_name(tmp_path: Path, cache_dir, omni_dir: Path):
    directory = tmp_path / "omni@home"
    directory.symlink_to(omni_dir)
    assert load_family(str(directory), cache_dir).info.checkpoint == str(directory)


@pytest.mark.parametrize(
    "directory,name",
    [
        ("/hub/models--Qwen--Qwen3-Omni/snapshots/abc", "Qwen/Qwen3-Omni@abc"),
        ("/runs/team--omni/snapshots/step-100", "/runs/team--omni/snapshots/step-100"),
        ("/hub/models--gpt2/snapshots/abc", "/hub/models--gpt2/snapshots/abc"),
    ],
)
def test_only_directories_of_the_hubs_cache_have_a_name_on_the_hub(directory: str, name: str):
    assert published.checkpoint_name(Path(directory)) == name


def test_a_word_that_is_no_family_names_all_that_is_possible(cache_dir):
    with pytest.raises(ValueError, match=r"known: smollm2-whisper, a checkpoint's directory, or its name on"):
        load_family("nonesuch", cache_dir)
