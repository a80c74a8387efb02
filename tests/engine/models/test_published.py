"""From `--model` to a family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.models import load_family, published
from engine.models.prepare import PrepareError
from tests.support import tiny_omni


@pytest.mark.parametrize("name", tiny_omni.NAMES)
def test_the_family_is_recognised_from_the_checkpoint(name, cache_dir):
    family = load_family(str(tiny_omni.cached(name)), cache_dir)
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


def test_a_word_that_is_no_family_names_all_that_is_possible(cache_dir):
    with pytest.raises(ValueError, match=r"known: smollm2-whisper, a checkpoint's directory, or its name on"):
        load_family("nonesuch", cache_dir)
