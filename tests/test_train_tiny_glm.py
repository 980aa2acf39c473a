"""The training example runs end to end, and the committed model is what the script describes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "models" / "tiny-glm-python"


def check_folder(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tokenizers = pytest.importorskip("tokenizers")
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((folder / "config.json").read_text())
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    kinds = config["indexer_types"]
    assert kinds == [
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared"
        for layer in range(config["num_hidden_layers"])
    ]
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        keys = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    for layer, kind in enumerate([*kinds, "full"]):  # the last one is the MTP layer
        has = f"model.layers.{layer}.self_attn.indexer.wk.weight" in keys
        assert has == (kind == "full")
    assert f"model.layers.{len(kinds)}.eh_proj.weight" in keys

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    chat = jinja2.Template(settings["chat_template"]).render(
        bos_token=settings["bos_token"],
        messages=[{"role": "user", "content": [{"type": "text", "text": "def"}]}],
        add_generation_prompt=True,
    )
    assert chat == "<sop><|user|>\ndef<|assistant|>\n"
    ids = tokenizer.encode(chat, add_special_tokens=False).ids
    assert ids[:2] == [config["bos_token_id"], tokenizer.token_to_id("<|user|>")]
    assert tokenizer.encode("x").ids[0] == config["bos_token_id"]
    assert "nats/token" in (folder / "README.md").read_text()


def test_the_committed_model_is_small_and_well_formed() -> None:
    check_folder(MODEL)
    assert sum(path.stat().st_size for path in MODEL.iterdir() if path.is_file()) <= 16_000_000


@pytest.mark.slow
def test_smoke_training_writes_a_whole_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = ROOT / "examples" / "train_tiny_glm.py"
    command = [sys.executable, str(script), "--smoke", "--out", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_folder(tmp_path / "model")
