"""Language models beside the naive way: prompts one by one, and a prefix run again for each new token.

    pytest benchmarks/bench_lm.py -s
"""
import time

import pytest
import torch

from icl26.lm import HFLM, tiny_lm
from icl26.lm.hf import encode, encode_prompt
from timing import best_of

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROMPTS = [(TEXT * 2)[: 5 + 3 * i] for i in range(32)]
CONTINUATIONS = [" it was"] * 32
NEW_TOKENS = 64


@pytest.fixture(scope="module", params=["llama", "gemma"])
def lm(request):
    made = tiny_lm(style=request.param, d_model=128, n_layers=4, seed=1)
    return HFLM(made.model, made.tokenizer, batch_size=16)


def one_by_one(lm) -> torch.Tensor:
    "Each pair in a forward pass of its own, with the logits of every position."
    out = []
    with torch.no_grad():
        for p, c in zip(PROMPTS, CONTINUATIONS, strict=True):
            p, c = encode_prompt(lm.tokenizer, p), encode(lm.tokenizer, c)
            logp = lm.model(torch.tensor([p + c])).logits[0].log_softmax(-1)
            out.append(logp[range(len(p) - 1, len(p) + len(c) - 1), c])
    return torch.cat(out)


def test_score(benchmark, lm):
    def ours():
        return torch.cat([s.logprobs for s in lm.score(PROMPTS, CONTINUATIONS)])

    torch.testing.assert_close(ours(), one_by_one(lm), atol=1e-4, rtol=0)
    naive = best_of(lambda: one_by_one(lm), 3, time.perf_counter)
    benchmark.pedantic(ours, rounds=5)
    benchmark.extra_info["ratio"] = ratio = benchmark.stats["min"] / naive
    print(f"\nscore of {len(PROMPTS)} pairs: batches take {ratio:.2f} of one by one ({naive:.3f} s)")
    assert ratio < 1


def rerun(lm, prompt) -> list[int]:
    "Greedy continuation that runs the whole text again for each token."
    row = encode_prompt(lm.tokenizer, prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            row.append(lm.model(torch.tensor([row])).logits[0, -1].argmax().item())
    return row[-NEW_TOKENS:]


def test_generate(benchmark, lm):
    prompts = [(TEXT * 4)[:200], (TEXT * 4)[:320]]
    lm.model.generation_config.eos_token_id = lm.tokenizer.eos_token_id = None

    def ours():
        return [t[0] for t in lm.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0)]

    assert ours() == [lm.tokenizer.decode(rerun(lm, p), skip_special_tokens=True) for p in prompts]
    naive = best_of(lambda: [rerun(lm, p) for p in prompts], 3, time.perf_counter)
    benchmark.pedantic(ours, rounds=5)
    benchmark.extra_info["ratio"] = ratio = benchmark.stats["min"] / naive
    print(f"\n{NEW_TOKENS} tokens, two prompts: the cache takes {ratio:.2f} of running the prefix again ({naive:.3f} s)")
    assert ratio < 1
