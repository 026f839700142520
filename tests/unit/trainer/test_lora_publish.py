from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sampler_service.weights.files import read_tensors
from tandem.errors import InvalidRequest, LoadFailed, NameTaken
from tandem.protocol.worker import LoraSpec
from tandem.weights import open_version
from tandem.weights.model_store import RECORD_NAME, ModelRecord
from tests.support.local_trainer import (
    data_of,
    logprobs,
    logprobs_of_model,
    make,
    plain,
    publish,
    spec_of,
    train,
    weights,
)
from tests.support.tiny_model import ARCHITECTURES, write_tiny_model
from trainer_service.lora.merge import merge


def compare_with_canary(model: torch.nn.Module, version: Path) -> None:
    canary = open_version(version).canary
    tokens = torch.tensor(canary.tokens)
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0]
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(chosen.numpy(), canary.logprobs, atol=1e-5)


# --- The adapter -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_computes_the_trainers_logprobs_with_the_adapter(models, tmp_path, architecture):
    """Also with a head that is tied to the embedding (qwen3)."""
    trainer = make(models[architecture], spec_of(architecture))
    train(trainer, 3)
    reply = publish(trainer, tmp_path / "v1")
    assert reply.version.adapter and reply.version.step == 3
    data = data_of(9)
    expected = logprobs(trainer, data)
    base = plain(models[architecture])
    assert np.abs(logprobs_of_model(base, data) - expected).max() > 0.01
    loaded = PeftModel.from_pretrained(base, tmp_path / "v1").eval()
    np.testing.assert_allclose(logprobs_of_model(loaded, data), expected, atol=1e-5)
    compare_with_canary(loaded, tmp_path / "v1")


@pytest.mark.parametrize("kind", ["attention", "mlp", "unembedding"])
def test_the_configuration_names_the_adapted_layers_and_no_others(models, tmp_path, kind):
    kinds = {"attention": False, "mlp": False, "unembedding": False, kind: True}
    trainer = make(models["llama"], LoraSpec(rank=3, alpha=6.5, seed=1, **kinds), name="my base")
    train(trainer, 1)
    publish(trainer, tmp_path / "v1")
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.5)
    assert config["base_model_name_or_path"] == "my base"
    loaded = PeftModel.from_pretrained(plain(models["llama"]), tmp_path / "v1")
    adapted = {
        name.removeprefix("base_model.model.").split(".lora_")[0]
        for name, _ in loaded.named_parameters()
        if ".lora_" in name
    }
    here = {n.rpartition(".")[0] for n in weights(trainer) if ".lora_" in n}
    assert adapted == here
    np.testing.assert_allclose(
        logprobs_of_model(loaded, data_of(4)), logprobs(trainer, data_of(4)), atol=1e-5
    )


def test_an_adapter_is_small_verified_and_has_its_tokenizer(models, tmp_path):
    trainer = make(models["qwen3"])
    publish(trainer, tmp_path / "v1")
    manifest = open_version(tmp_path / "v1")
    assert (manifest.adapter, manifest.dtype, manifest.tensors) == (True, "float32", 2 * 22)
    names = {entry.name for entry in manifest.files}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    # With a config.json, transformers would look for a whole model here.
    assert not any(name.startswith(("model", "config")) for name in names)
    trained = sum(t.numel() for n, t in weights(trainer).items() if ".lora_" in n)
    assert (tmp_path / "v1" / "adapter_model.safetensors").stat().st_size < 4 * trained + 10_000
    assert AutoTokenizer.from_pretrained(tmp_path / "v1").vocab_size == 96


def test_transformers_loads_an_adapter_directory_when_the_base_is_where_it_says(models, tmp_path):
    trainer = make(models["llama"], name=str(models["llama"]))
    train(trainer, 2)
    publish(trainer, tmp_path / "v1")
    loaded = plain(tmp_path / "v1")
    np.testing.assert_allclose(
        logprobs_of_model(loaded, data_of(4)), logprobs(trainer, data_of(4)), atol=1e-5
    )


# --- The merged model ------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_merged_model_computes_what_the_trainer_computes(models, tmp_path, architecture):
    trainer = make(models[architecture], spec_of(architecture))
    train(trainer, 3)
    publish(trainer, tmp_path / "v1")
    merge(tmp_path / "v1", models[architecture], tmp_path / "out")
    expected = logprobs(trainer, data_of(9))
    loaded = plain(tmp_path / "out")
    np.testing.assert_allclose(logprobs_of_model(loaded, data_of(9)), expected, atol=1e-5)
    compare_with_canary(loaded, tmp_path / "v1")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 96


def test_a_tied_head_is_untied_only_when_an_adapter_was_merged_into_it(models, tmp_path):
    both, inner = make(models["qwen3"]), make(models["qwen3"], LoraSpec(rank=4, unembedding=False))
    for name, trainer in (("both", both), ("inner", inner)):
        train(trainer, 2)
        publish(trainer, tmp_path / f"adapter-{name}")
        merge(tmp_path / f"adapter-{name}", models["qwen3"], tmp_path / name)
    tensors = load_file(tmp_path / "both" / "model.safetensors")
    base = load_file(models["qwen3"] / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    assert torch.equal(tensors[embedding], base[embedding])
    assert not torch.equal(tensors["lm_head.weight"], base[embedding])
    assert (
        json.loads((tmp_path / "both" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert json.loads((tmp_path / "inner" / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(tmp_path / "inner" / "model.safetensors")


def test_an_engine_with_a_tied_head_refuses_an_untied_version_untouched(models, tmp_path):
    from types import SimpleNamespace

    from sampler_service.weights.loader import LoadableVersion, Loader

    trainer = make(models["qwen3"])
    train(trainer, 1)
    publish(trainer, tmp_path / "adapter")
    merge(tmp_path / "adapter", models["qwen3"], tmp_path / "merged")
    publish(make(tmp_path / "merged", None), tmp_path / "v1")
    engine = SimpleNamespace(  # it fails if asked to load
        facts=SimpleNamespace(dtype="float32", vocabulary=96, max_length=64, device="cpu"),
        weight_sums=dict,
    )
    loader = Loader(engine, base=models["qwen3"], tolerance=1e-4)
    name = open_version(tmp_path / "v1").version
    with pytest.raises(LoadFailed, match="output head of its own"):
        loader.verify(LoadableVersion(name=name, path=tmp_path / "v1"), lambda: None)


@pytest.fixture(scope="module")
def published(models, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    for name in ("qwen3", "llama"):
        trainer = make(models[name], spec_of(name))
        train(trainer, 2)
        publish(trainer, root / name)
    return {path.name: path for path in root.iterdir()}


def test_a_base_of_several_files_in_bfloat16_stays_so(models, published, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    # A second copy under other names, absent from the index, as in some repositories.
    save_file({"layers.0.wo": torch.ones(2)}, tmp_path / "base" / "consolidated.safetensors")
    names = {name for name, _ in read_tensors(tmp_path / "base")}
    assert names == {*base.state_dict()} - {"lm_head.weight"}
    merge(published["qwen3"], tmp_path / "base", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()
    expected = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        published["qwen3"],
    )
    difference = logprobs_of_model(model.float(), data_of(3)) - logprobs_of_model(
        expected, data_of(3)
    )
    assert np.abs(difference).max() < 0.3  # of large weights, rounded to bfloat16


def test_merging_never_replaces_a_directory_and_leaves_nothing_when_it_fails(
    models, published, tmp_path
):
    (tmp_path / "out").mkdir()
    with pytest.raises(NameTaken, match="out exists already"):
        merge(published["qwen3"], models["qwen3"], tmp_path / "out")
    with pytest.raises(InvalidRequest, match="belongs to another base model"):
        merge(published["qwen3"], models["gpt_neox"], tmp_path / "other")
    wide = write_tiny_model(tmp_path / "wide", head_dim=32)
    with pytest.raises(InvalidRequest, match=r"k_proj is \[16, 32\], the base model's \[32, 32\]"):
        merge(published["qwen3"], wide, tmp_path / "other")
    with pytest.raises(InvalidRequest, match="not an adapter"):
        merge(models["qwen3"], models["qwen3"], tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "wide"}


def test_a_damaged_adapter_is_not_merged(models, published, tmp_path):
    import shutil

    shutil.copytree(published["llama"], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: t + 1 for name, t in load_file(file).items()}, file)
    with pytest.raises(LoadFailed, match=r"damaged|bytes"):
        merge(tmp_path / "adapter", models["llama"], tmp_path / "out")


# --- Adapters in other programs -------------------------------------------------------------


def card_of(version: Path) -> str:
    return (version / "README.md").read_text()


def test_the_card_says_which_programs_load_an_adapter(models, tmp_path):
    (tmp_path / "base").mkdir()
    for file in models["qwen3"].iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "base" / "README.md").write_text("the base model's own card")
    kinds = {"attention": True, "mlp": False}
    for name, base, head in (
        ("tied", tmp_path / "base", True),
        ("headless", models["qwen3"], False),
        ("untied", models["llama"], True),
    ):
        lora = LoraSpec(rank=3, alpha=6.0, seed=1, **kinds, unembedding=head)
        publish(make(base, lora, name="org/base"), tmp_path / name)
    tied, headless, untied = (card_of(tmp_path / name) for name in ("tied", "headless", "untied"))
    assert "base_model: org/base" in tied and "own card" not in tied
    assert "Do not merge it with PEFT's `merge_and_unload`" in tied
    assert "**tinker-cookbook** (`weights.build_hf_model`" in tied
    for other in (headless, untied):
        assert "Do not merge" not in other
        assert "`tandem checkpoints export --merged`" in other
    assert "embedding_modules" in untied and "embedding_modules" not in headless


def test_an_adapter_names_the_hubs_repository_of_a_downloaded_base(models, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for file in models["llama"].iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    record = ModelRecord(repository="org/llama", revision="main", commit="c0", bytes=1, added_at=0)
    (base / RECORD_NAME).write_text(record.model_dump_json())
    publish(make(base, name="my-own-name"), tmp_path / "v1")
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/llama", "c0")


def test_peft_finds_the_base_model_of_an_adapter_that_names_its_folder(models, tmp_path):
    for name in ("llama", "qwen3"):
        trainer = make(models[name], name=str(models[name]))
        train(trainer, 2)
        publish(trainer, tmp_path / name)
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        np.testing.assert_allclose(
            logprobs_of_model(loaded.eval(), data_of(4)), logprobs(trainer, data_of(4)), atol=1e-5
        )
