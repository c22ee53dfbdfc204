"icl26.decision.search: the archive evaluates once and never forgets its best; the tree keeps its accounts."
import math

import numpy as np
import pytest

from icl26.decision.search import Archive, Node, StopSearch, uct


def word_tree(w, length=4):
    return None if len(w) == length else [w + "0", w + "1"]


# -- archive ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("maximize", [True, False])
def test_archive_keeps_the_best_and_never_gets_worse(maximize):
    rng, archive, history = np.random.default_rng(0), Archive(key=int, top_k=3, maximize=maximize), []
    scores = {i: float(rng.integers(0, 5)) for i in range(30)}
    for i in rng.permutation(30):
        archive.evaluate(int(i), scores.get)
        history.append(archive.best[0].score)
        assert len(archive) == min(3, len(archive.seen))
    gain = np.diff(history) if maximize else -np.diff(history)
    assert (gain >= 0).all()
    assert sorted((e.score for e in archive.best), reverse=maximize) == sorted(scores.values(), reverse=maximize)[:3]


def test_equal_scores_keep_the_older():
    archive = Archive(key=str, top_k=2)
    for item in "abc":
        archive.evaluate(item, lambda _: 1.0)
    assert [e.item for e in archive.best] == ["a", "b"]


def test_failures_are_evaluated_once_too_and_recorded_in_order():
    calls = []

    def score(x):
        calls.append(x)
        return {0: math.inf, 1: math.nan, 2: 1 / 0 if x == 2 else 0}.get(x, 1.0)

    archive = Archive(key=int, top_k=5)
    for x in (0, 1, 2, 3, 2, 1, 0):
        archive.evaluate(x, score)
    assert calls == [0, 1, 2, 3] and [e.item for e in archive.errors] == [0, 1, 2] and [e.item for e in archive.best] == [3]
    assert "inf" in archive.errors[0].error and "ZeroDivisionError" in archive.errors[2].error


def test_other_exceptions_are_not_swallowed():
    with pytest.raises(KeyError):
        Archive(key=int, top_k=1).evaluate(1, {}.__getitem__)
    entry = Archive(key=int, top_k=1).evaluate(1, {}.__getitem__, catch=KeyError)
    assert entry.score is None and "KeyError" in entry.error


@pytest.mark.parametrize("arguments, error", [((3, 1), TypeError), ((int, 0), ValueError), ((int, 1.5), ValueError), ((int, True), ValueError)])
def test_archive_arguments(arguments, error):
    with pytest.raises(error):
        Archive(*arguments)


# -- tree ------------------------------------------------------------------------------------------------------------

def test_every_rollout_is_accounted_for():
    tree = uct("", word_tree, lambda w: w.count("1") / 4, 100, 1.4, 0)
    assert tree.root.visits == 100 == len(tree.order) and sum(x.visits for x in tree.leaves) == 100
    for node in tree.root.walk():
        if node.children and node.visits:
            assert node.visits == sum(x.visits for x in node.children)
            assert node.total == pytest.approx(sum(x.total for x in node.children))
    assert tree.leaves[0].state == "1111" and [x.mean for x in tree.leaves] == sorted((x.mean for x in tree.leaves), reverse=True)


def test_each_node_is_expanded_once():
    seen = []
    uct("", lambda w: (seen.append(w), word_tree(w))[1], lambda w: 0.5, 200)
    assert len(seen) == len(set(seen)) == 31


def test_without_exploration_it_is_greedy_and_with_it_everything_is_visited():
    share = lambda w: w.count("1") / 4
    greedy, wide = (uct("", word_tree, share, 160, c=c) for c in (0, 1000.0))
    assert {x.visits for x in wide.leaves} == {10} and len(wide.leaves) == 16
    assert greedy.leaves[0].state == "1111" and greedy.leaves[0].visits > 120


def test_same_seed_same_tree():
    a, b = (uct("", word_tree, lambda w: 0.5, 40, seed=3) for _ in range(2))
    assert [x.state for x in a.order] == [x.state for x in b.order]


def test_dead_ends():
    tree = uct("", lambda w: [] if w == "0" else word_tree(w, 2), lambda w: 1.0, 10)
    assert tree.root.children[0].pruned and not tree.root.pruned and tree.root.children[0].visits == 1
    assert tree.root.total == 9 and tree.root.visits == 10
    dead = uct("", lambda w: [] if len(w) == 1 else ["0", "1"], lambda w: 1.0, 10)
    assert dead.root.pruned and dead.rollouts == 2 and not dead.leaves


@pytest.mark.parametrize("where", ["expand", "evaluate"])
def test_a_budget_ends_the_search(where):
    left = [7]

    def spend(value):
        left[0] -= 1
        if left[0] < 0:
            raise StopSearch
        return value

    expand = (lambda w: spend(word_tree(w))) if where == "expand" else word_tree
    evaluate = (lambda w: spend(0.5)) if where == "evaluate" else (lambda w: 0.5)
    tree = uct("", expand, evaluate, 100)
    assert tree.stopped and 0 < tree.rollouts < 100 and tree.leaves


@pytest.mark.parametrize("n, c", [(0, 1), (1.5, 1), (True, 1), (3, -1), (3, math.inf), (3, math.nan)])
def test_tree_arguments(n, c):
    with pytest.raises(ValueError):
        uct("", word_tree, lambda w: 0.5, n, c)


def test_a_reward_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        uct("", word_tree, lambda w: math.inf, 3)
    assert Node("x").mean == 0
