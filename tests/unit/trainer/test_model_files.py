from __future__ import annotations

from tandem.weights.layout import copy_small_files


def test_a_base_model_that_was_published_before_passes_on_nothing_of_ours(tmp_path):
    base, version = tmp_path / "base", tmp_path / "version"
    base.mkdir(), version.mkdir()
    kept = {"config.json", "tokenizer.json"}
    for name in (*kept, "manifest.json", "adapter_config.json", "model.safetensors"):
        (base / name).write_text("{}")
    assert {file.name for file in copy_small_files(base, version)} == kept
    assert {file.name for file in version.iterdir()} == kept
