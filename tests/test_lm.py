"Language models: whatever the batch, the padding and the order, the answer is the same."
import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from icl26.lm import HFLM, LM, ScriptedLM, TokenScores, byte_tokenizer, choice_logprobs, tiny_lm, word_tokenizer
from icl26.lm import hf
from icl26.lm.hf import batch_error, encode, encode_prompt, end_tokens

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom"
PROMPTS = [TEXT[:k] for k in (1, 2, 3, 5, 8, 13, 21, 34, 55, 77)]  # the sliding window of the Gemma style holds 16
CONTINUATIONS = [" and", ".", " or so", "!", " the end", "a", " it", " again and again", " now.", " of"]
STYLES = ("llama", "gemma", "gpt2")


def gpt2():
    "A model with learned absolute positions."
    from transformers import GPT2Config, GPT2LMHeadModel

    tok = byte_tokenizer()
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=len(tok), initializer_range=0.2, **ids)
        return HFLM(GPT2LMHeadModel(config), tok)


def make(style):
    return gpt2() if style == "gpt2" else tiny_lm(style=style)


def battery(lm):
    "The promise: one ragged batch gives what single calls give, padded left or right."
    for lm.tokenizer.padding_side in ("left", "right"):
        error = batch_error(lm, PROMPTS, CONTINUATIONS)
        assert error["score"] < 1e-4, (lm.tokenizer.padding_side, error)
        assert error["next"] < 1e-4, (lm.tokenizer.padding_side, error)
        assert error["greedy"] == 0, (lm.tokenizer.padding_side, error)


@pytest.mark.parametrize("style", STYLES)
def test_batch_of_one_equals_ragged_batch(style):
    battery(make(style))


@pytest.mark.parametrize("style", STYLES)
def test_battery_fails_without_position_ids(style):
    lm = make(style)
    whole = type(lm.model).forward
    lm.model.forward = lambda *a, position_ids=None, **kw: whole(lm.model, *a, **kw)
    with pytest.raises(AssertionError):
        battery(lm)


def test_battery_fails_without_alignment(monkeypatch):
    "Padding between a prompt and its continuation: harmless to full attention, not to a sliding window."
    monkeypatch.setattr(hf, "align_right", lambda cache, mask: mask)
    battery(make("llama"))
    with pytest.raises(AssertionError):
        battery(make("gemma"))


def test_battery_fails_without_attention_mask():
    lm = make("llama")
    whole = type(lm.model).forward
    lm.model.forward = lambda *a, attention_mask, **kw: whole(lm.model, *a, attention_mask=attention_mask * 0 + 1, **kw)
    with pytest.raises(AssertionError):
        battery(lm)


@pytest.mark.parametrize("style", STYLES)
def test_single_prompt_against_transformers(style):
    "Transformers' own loss and its own generate, on one prompt without padding."
    lm = make(style)
    p, c = encode_prompt(lm.tokenizer, PROMPTS[6]), encode(lm.tokenizer, CONTINUATIONS[6])
    ids = torch.tensor([p + c])
    labels = torch.tensor([[-100] * len(p) + c])
    lm.model.eval()
    with torch.no_grad():
        loss = lm.model(ids, labels=labels).loss.item()
        theirs = lm.model.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0, len(p) :]
    assert lm.score([PROMPTS[6]], [CONTINUATIONS[6]])[0].mean == pytest.approx(-loss, abs=1e-5)
    ours = lm.generate([PROMPTS[6]], max_new_tokens=20, temperature=0)[0][0]
    assert ours == lm.tokenizer.decode(theirs, skip_special_tokens=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_samples_do_not_depend_on_the_batch(style, side):
    lm = tiny_lm(style=style)
    lm.tokenizer.padding_side = side
    ask = {"n": 3, "max_new_tokens": 12, "seed": 11, "top_p": 0.9, "temperature": 0.8}
    runs = []
    for lm.batch_size in (1, 2, 7, 100):
        runs.append(lm.generate(PROMPTS, **ask))
    assert all(r == runs[0] for r in runs)
    assert lm.generate(PROMPTS[:4], **ask) == runs[0][:4]
    assert [r[:1] for r in runs[0]] == lm.generate(PROMPTS, **{**ask, "n": 1})
    assert lm.generate(PROMPTS, **{**ask, "seed": 12}) != runs[0]
    assert lm.generate(PROMPTS, **{**ask, "seed": None}) != lm.generate(PROMPTS, **{**ask, "seed": None})
    same = lm.generate([PROMPTS[5]] * 2, **ask)
    assert same[0] != same[1]  # two places in a call, two streams


def test_samples_follow_the_model():
    lm = tiny_lm(list("abcdefgh"), batch_size=500)
    p = lm.next_token_logprobs(["a b c"])[0].double().exp().numpy()
    first = lm.generate(["a b c"], n=4000, max_new_tokens=1, seed=0)[0]
    special = set(lm.tokenizer.all_special_tokens)
    counts = {t: 0 for t in lm.tokenizer.get_vocab() if t not in special}
    for t in first:
        if t.strip():
            counts[t.strip()] += 1
    q = np.array([p[lm.tokenizer.convert_tokens_to_ids(t)] for t in counts])
    seen = np.array(list(counts.values()))
    assert chisquare(seen, q / q.sum() * seen.sum()).pvalue > 1e-4
    assert abs(seen.sum() / 4000 - q.sum()) < 4 * np.sqrt(q.sum() * (1 - q.sum()) / 4000) + 1e-9


def test_global_random_state_is_left_alone():
    lm = tiny_lm()
    state = torch.get_rng_state()
    lm.generate(["a"], max_new_tokens=3, seed=1)
    lm.generate(["a"], max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_stop_strings_in_a_batch():
    "Each sample ends before its first stop string, also one that spans tokens, in a batch as alone."
    lm = tiny_lm(train_on=f"{TEXT}. " * 3, steps=40, d_model=32)  # half trained: it writes letters
    ask = {"max_new_tokens": 40, "temperature": 0.7, "top_p": 0.9, "seed": 0}
    free = lm.generate(PROMPTS, **ask)
    stops = [free[0][0][5:8], free[4][0][10:12]]
    assert all(stops) and "\ufffd" not in "".join(stops)  # half a character may still become another one
    cut = lm.generate(PROMPTS, stop=stops, **ask)
    expected = [[f[0][: min([f[0].find(s) for s in stops if s in f[0]], default=None)]] for f in free]
    assert cut == expected and sum(c != f for c, f in zip(cut, free)) >= 2
    assert [lm.generate([PROMPTS[0]], stop=stops, **ask)] == [cut[:1]]


def test_end_of_text_tokens_end_a_sample():
    lm = tiny_lm()
    free = lm.generate(["abc"], max_new_tokens=12, temperature=0)[0][0]
    ids = encode(lm.tokenizer, free)
    lm.model.generation_config.eos_token_id = [2, ids[4]]
    assert end_tokens(lm.model, lm.tokenizer) == {2, ids[4]}
    short = lm.generate(["abc", "a longer prompt"], max_new_tokens=12, temperature=0)[0][0]
    assert short == lm.tokenizer.decode(ids[: ids.index(ids[4])])


def test_context_bounds_what_is_asked_and_what_is_written(monkeypatch):
    lm = tiny_lm(list("abcdefgh"), max_positions=32)
    lm.tokenizer.eos_token_id = lm.model.generation_config.eos_token_id = None
    assert end_tokens(lm.model, lm.tokenizer) == set()
    rows = []
    body = hf.generate_ids
    monkeypatch.setattr(hf, "generate_ids", lambda *a: rows.extend(body(*a)) or rows)
    lm.generate(["a " * 20, "b"], max_new_tokens=100, temperature=0)
    assert [len(r) for r in rows] == [12, 31]  # 21 and 2 tokens with BOS; the last new token is not fed
    with pytest.raises(ValueError, match="context of 32"):
        lm.score(["a " * 40], ["b"])
    assert len(lm.score(["a " * 31], ["b"])[0]) == 1  # BOS and 31 words are fed, the last one is only predicted


def test_long_lists_and_order():
    "Any list order, sorted into batches or not, gives each prompt its own answer."
    lm = tiny_lm(batch_size=3)
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    base = lm.next_token_logprobs(PROMPTS)
    scores = [s.total for s in lm.score(PROMPTS, CONTINUATIONS)]
    for lm.sort_by_length in (True, False):
        assert torch.allclose(lm.next_token_logprobs([PROMPTS[i] for i in order]), base[order], atol=1e-4)
        mixed = lm.score([PROMPTS[i] for i in order], [CONTINUATIONS[i] for i in order])
        np.testing.assert_allclose([s.total for s in mixed], np.array(scores)[order], atol=1e-4)


def spy(lm):
    "Record the shape of each batch and how many positions reach the head."
    seen = []
    body = type(lm.model).forward

    def forward(*a, **kw):
        seen.append((tuple(kw["input_ids"].shape), kw["input_ids"].clone()))
        return body(lm.model, *a, **kw)

    lm.model.forward = forward
    heads = []
    lm.model.lm_head.register_forward_hook(lambda m, args, out: heads.append(out.numel() // out.shape[-1]))
    return seen, heads


def test_one_forward_in_order_and_head_only_where_needed():
    lm = tiny_lm(batch_size=10)
    lm.tokenizer.padding_side = "right"
    seen, heads = spy(lm)
    lm.score(PROMPTS, CONTINUATIONS)
    asked = [encode_prompt(lm.tokenizer, p) for p in PROMPTS]
    assert len(seen) == 1
    assert all(seen[0][1][i, : len(a)].tolist() == a for i, a in enumerate(asked))  # in the list's order
    assert heads == [sum(len(encode(lm.tokenizer, c)) for c in CONTINUATIONS)]
    heads.clear()
    lm.top_logprobs(PROMPTS)
    lm.next_token_logprobs(PROMPTS)
    assert heads == [10, 10]
    heads.clear()
    one = lm.top_logprobs(PROMPTS, k=5, rows=[7])
    assert heads == [1] and len(seen) == 4 and seen[-1][0][0] == 10  # one position, all ten rows in the pass
    assert list(one[0]) == list(lm.top_logprobs(PROMPTS, k=5)[7])


def test_repeated_prompts_are_all_in_the_batch():
    "Who measures how traffic disturbs a result decides what is in the batch: equal rows are not merged."
    lm = tiny_lm(batch_size=4)
    seen, _ = spy(lm)
    lm.top_logprobs(["x", "x", "traffic", "x"])
    assert [s[0][0] for s in seen] == [4]


def test_bfloat16_jitters_with_its_batch_and_float32_does_not():
    traffic = [TEXT[i : i + 9 * i] for i in range(1, 8)]
    spread = {}
    for dtype in ("float32", "bfloat16"):
        lm = tiny_lm(d_model=128, n_layers=3)
        lm = HFLM(lm.model, lm.tokenizer, dtype=dtype, batch_size=8)
        assert lm.dtype == getattr(torch, dtype)
        assert lm.next_token_logprobs(["x"]).dtype == torch.float32
        rows = [lm.next_token_logprobs(traffic[:k] + ["x"], rows=[k]) for k in range(8)]
        spread[dtype] = float((torch.cat(rows) - rows[0]).abs().max())
    assert spread["float32"] < 1e-4
    alone = tiny_lm(d_model=128, n_layers=3).next_token_logprobs(["x"])
    assert float((rows[0] - alone).abs().max()) < 0.3  # bfloat16 is the same model, up to its precision


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_casting_a_live_model_is_loading_it_in_that_type(style, tmp_path):
    lm = tiny_lm(style=style)
    lm.save_pretrained(tmp_path)
    cast = HFLM(lm.model, lm.tokenizer, dtype="bfloat16", batch_size=8)
    loaded = HFLM(tmp_path, dtype="bfloat16", device="cpu")
    assert cast.model_hash == loaded.model_hash
    assert torch.equal(cast.next_token_logprobs(PROMPTS[:8]), loaded.next_token_logprobs(PROMPTS[:8]))


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_lora_adapter(style, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = tiny_lm(style=style)
    plain, before = base.next_token_logprobs(PROMPTS), base.model_hash
    base.save_pretrained(tmp_path / "base")
    tuned = get_peft_model(copy.deepcopy(base.model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    lm = HFLM(tuned, base.tokenizer)
    torch.testing.assert_close(lm.next_token_logprobs(PROMPTS), plain, atol=1e-5, rtol=0)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                p.add_(0.2)
    moved = lm.next_token_logprobs(PROMPTS)
    assert (moved - plain).abs().max() > 0.05
    battery(lm)
    tuned.save_pretrained(tmp_path / "adapter")
    again = HFLM(tmp_path / "base", adapter=tmp_path / "adapter", device="cpu")
    torch.testing.assert_close(again.next_token_logprobs(PROMPTS), moved, atol=1e-5, rtol=0)
    merged = HFLM(copy.deepcopy(tuned).merge_and_unload(), base.tokenizer)
    torch.testing.assert_close(merged.next_token_logprobs(PROMPTS), moved, atol=1e-4, rtol=0)
    assert base.model_hash == before != again.model_hash


def test_prompt_learning_adapters_are_refused():
    from peft import PromptTuningConfig, get_peft_model

    base = tiny_lm()
    model = get_peft_model(base.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="virtual tokens"):
        HFLM(model, base.tokenizer)


@pytest.mark.parametrize("style", ["llama", "gemma"])
@pytest.mark.parametrize("vocab", ["bytes", ["red", "green", "box", "."]])
def test_saved_model_comes_back(style, vocab, tmp_path):
    lm = tiny_lm(vocab, style=style, train_on="red box . green box . " * 20, steps=3, batch_size=4, seq_len=16)
    lm.save_pretrained(tmp_path)
    back = HFLM(tmp_path, device="cpu", batch_size=4)
    assert back.model_hash == lm.model_hash
    assert end_tokens(back.model, back.tokenizer) == {2} and back.tokenizer.bos_token_id == 1
    torch.testing.assert_close(back.next_token_logprobs(["red box"]), lm.next_token_logprobs(["red box"]))
    ask = {"n": 2, "seed": 3, "max_new_tokens": 6}
    assert back.generate(["red"], **ask) == lm.generate(["red"], **ask)


def test_training_is_reproducible_and_learns():
    made = [tiny_lm(train_on="ab" * 200, steps=30, d_model=32, batch_size=8, seq_len=32) for _ in range(2)]
    assert made[0].model_hash == made[1].model_hash and made[0].losses == made[1].losses
    lm = made[0]
    assert lm.generate(["abab"], max_new_tokens=6, temperature=0) == [["ababab"]]
    assert lm.losses[-1] < 0.3 < lm.losses[0]


def test_model_hash_sees_training():
    lm = tiny_lm()
    before = lm.model_hash
    assert lm.model_hash == before
    lm.model.train()
    optimiser = torch.optim.SGD(lm.model.parameters(), lr=0.1)
    lm.model(torch.tensor([[1, 5, 9]]), labels=torch.tensor([[1, 5, 9]])).loss.backward()
    optimiser.step()
    assert lm.model_hash != before


def test_model_being_trained_keeps_its_mode_and_gradients():
    lm = gpt2()  # dropout 0.1
    lm.model.train()
    a, b = lm.score(["abc"], ["def"])[0], lm.score(["abc"], ["def"])[0]
    assert torch.equal(a.logprobs, b.logprobs)  # dropout is off while it is asked
    assert lm.model.training and lm.model.transformer.drop.training
    loss = lm.model(torch.tensor([[1, 5, 9]]), labels=torch.tensor([[1, 5, 9]])).loss
    loss.backward()
    assert all(p.grad is not None for p in lm.model.parameters())


def test_choices():
    lm = tiny_lm(batch_size=3)
    choices = [" yes", " no", "!"]
    q = choice_logprobs(lm, PROMPTS, choices)
    totals = torch.tensor([[lm.score([p], [c])[0].total for c in choices] for p in PROMPTS])
    torch.testing.assert_close(q, totals.log_softmax(-1), atol=1e-4, rtol=0)
    single = choice_logprobs(lm, PROMPTS, ["a", "b"])
    direct = lm.next_token_logprobs(PROMPTS)[:, [encode(lm.tokenizer, c)[0] for c in "ab"]].log_softmax(-1)
    torch.testing.assert_close(single, direct, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="choices"):
        choice_logprobs(lm, ["a"], [])
    with pytest.raises(ValueError, match="choices"):
        choice_logprobs(lm, ["a"], "yes")
    assert choice_logprobs(lm, [], choices).shape == (0, 3)


def test_one_token_answers_share_a_row():
    lm = tiny_lm(batch_size=100)
    seen, heads = spy(lm)
    choice_logprobs(lm, PROMPTS, ["a", "b", "c", "d"])
    assert [s[0][0] for s in seen] == [len(PROMPTS)] and heads == [len(PROMPTS)]


def test_chats_need_a_template():
    lm = tiny_lm()
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="chat template"):
        lm.generate([chat])
    lm.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    torch.testing.assert_close(lm.next_token_logprobs([chat]), lm.next_token_logprobs(["user: hi\nassistant:"]))


def test_any_text_survives_the_byte_tokenizer():
    tok = byte_tokenizer()
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(map(chr, rng.choice([*range(1, 0x250), *range(0x4E00, 0x4E40), 0x1F600], 40)))
        assert tok.decode(encode(tok, text), clean_up_tokenization_spaces=False) == text


def test_tiny_lm_takes_a_tokenizer():
    tok = word_tokenizer(["a", "b"])
    lm = tiny_lm(tok)
    assert lm.tokenizer is tok and lm.model.config.vocab_size == 6
    assert len(lm.top_logprobs(["a"], k=50)[0]) == 6


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.generate("text"), TypeError, "prompts"),
        (lambda m: m.generate([1]), TypeError, r"prompts\[0\]"),
        (lambda m: m.generate(["a"], n=0), ValueError, "n must"),
        (lambda m: m.generate(["a"], temperature=float("nan")), ValueError, "temperature"),
        (lambda m: m.generate(["a"], top_p=1.5), ValueError, "top_p"),
        (lambda m: m.generate(["a"], stop=[""]), ValueError, "stop"),
        (lambda m: m.generate(["a"], seed="x"), TypeError, "seed"),
        (lambda m: m.score(["a"], []), ValueError, "continuations"),
        (lambda m: m.score(["a"], [""]), ValueError, "empty"),
        (lambda m: m.score(["a"], "b"), TypeError, "continuations"),
        (lambda m: m.top_logprobs(["a"], k=0), ValueError, "k must"),
        (lambda m: m.next_token_logprobs(["a"], rows=[2]), ValueError, "rows"),
        (lambda m: HFLM(m.model, m.tokenizer, dtype="int4"), ValueError, "dtype"),
        (lambda m: HFLM(m.model, m.tokenizer, batch_size=0), ValueError, "batch_size"),
        (lambda m: HFLM(m.model), TypeError, "tokenizer"),
        (lambda m: tiny_lm(style="bert"), ValueError, "style"),
        (lambda m: tiny_lm("words"), ValueError, "vocab"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(tiny_lm(d_model=16, n_layers=1))


def test_empty_lists():
    lm = tiny_lm()
    assert lm.generate([]) == [] and lm.score([], []) == [] and lm.top_logprobs([]) == []
    assert lm.next_token_logprobs([]).shape == (0, 259)


def test_protocol():
    assert isinstance(tiny_lm(), LM) and isinstance(ScriptedLM(str.upper), LM)
    s = TokenScores([1, 2], torch.tensor([-1.0, -3.0]))
    assert s.total == -4 and s.mean == -2 and "total -4" in repr(s)


def test_import_is_light():
    code = "import sys, icl26.lm; print([m for m in ('transformers', 'openai', 'peft') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_damaged_files_of_a_model_are_named(tmp_path, damage):
    tiny_lm(d_model=16, n_layers=1, n_heads=2).save_pretrained(tmp_path / "model")
    if damage == "weights":
        file = tmp_path / "model" / "model.safetensors"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        (tmp_path / "model" / "config.json").write_text("[1, 2]")
    with pytest.raises((ValueError, OSError), match="model"):
        HFLM(str(tmp_path / "model"))


def test_a_device_that_is_not_there_is_named():
    lm = tiny_lm(d_model=16, n_layers=1, n_heads=2)
    with pytest.raises(ValueError, match="device: 'cuda:99' cannot be used here"):
        HFLM(lm.model, tokenizer=lm.tokenizer, device="cuda:99")
    with pytest.raises(ValueError, match="device: 'nowhere' cannot be used here"):
        HFLM("no/such/model", device="nowhere")
