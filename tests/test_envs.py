"The area's environments: seeds fix episodes, experts play, padding changes nothing, augmented random search finds what it should."

import subprocess
import sys

import numpy as np
import pytest

from icl26.decision.envs import LinearPolicy, ars, make_minatar, mamujoco, scripted_expert


def play(env, act, seed):
    obs, _ = env.reset(seed=seed)
    log, done = [], False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        log.append((obs, reward))
        done = terminated or truncated
    return np.array([o for o, _ in log]), sum(r for _, r in log), terminated


def test_importing_the_module_imports_no_environment():
    code = "import sys, icl26.decision.envs as e; print(*[m for m in ('gymnasium', 'minatar', 'pettingzoo', 'mujoco') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


@pytest.mark.parametrize("game", ["breakout", "Asterix", "freeway", "space-invaders", "seaquest"])
def test_a_seed_fixes_an_episode(game):
    one, two = make_minatar(game, max_steps=40), make_minatar(game, max_steps=40)
    rng = np.random.default_rng(0)
    play(two, lambda o: rng.integers(two.action_space.n), seed=7)  # a past leaves no trace
    acts = np.random.default_rng(1).integers(one.action_space.n, size=40)
    runs = []
    for env in (one, two):
        stream = iter(acts)
        runs.append(play(env, lambda o, stream=stream: next(stream), seed=3))
    assert np.array_equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert runs[0][0].dtype == np.float32 and runs[0][0].shape[1:] == one.observation_space.shape


def test_truncation_is_not_termination():
    env = make_minatar("freeway", max_steps=5)
    boards, _, terminated = play(env, lambda o: 0, seed=0)
    assert len(boards) == 5 and not terminated
    with pytest.raises(ValueError, match="reset first"):
        env.step(0)


@pytest.mark.parametrize("bad, word", [(dict(game="pong"), "pong"), (dict(game="breakout", max_steps=-1), "max_steps"),
                                       (dict(game="breakout", sticky_action_prob=1.5), "sticky_action_prob")])
def test_bad_games_are_named(bad, word):
    with pytest.raises(ValueError, match=word):
        make_minatar(**bad)


def test_actions_out_of_range():
    env = make_minatar("breakout")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="0 to 2"):
        env.step(5)


def test_breakout_expert_follows_the_ball():
    board = np.zeros((10, 10, 4), np.float32)
    board[9, 4, 0] = board[5, 7, 1] = board[4, 6, 2] = 1  # paddle at 4, ball at 7, coming from 6
    expert = scripted_expert("Breakout")
    assert expert(board) == 2 and expert(board.ravel()) == 2
    mirrored = board[:, ::-1].copy()
    assert expert(mirrored) == 1
    board[9, 4, 0], board[9, 8, 0] = 0, 1  # already where the ball goes
    assert expert(board) == 0


def test_asterix_expert_takes_gold_and_avoids_enemies():
    board = np.zeros((10, 10, 4), np.float32)
    board[5, 5, 0] = board[5, 7, 3] = 1
    expert = scripted_expert("asterix")
    assert expert(board) == 3  # right, towards the gold
    board[5, 6, 1] = 1  # an enemy in between
    assert expert(board) != 3


@pytest.mark.parametrize("game, least", [("breakout", 8), ("asterix", 10), ("space_invaders", 12)])
def test_experts_are_far_above_chance(game, least):
    env, expert = make_minatar(game, max_steps=1000), scripted_expert(game)
    returns = [play(env, expert, seed)[1] for seed in range(100, 106)]
    rng = np.random.default_rng(0)
    chance = [play(env, lambda o: rng.integers(env.action_space.n), seed)[1] for seed in range(100, 106)]
    assert np.mean(returns) > np.mean(chance) + least


def test_team_padding():
    env = mamujoco("Hopper", "3x1", max_steps=4)
    obs = env.reset_joint(seed=1)
    assert obs.shape == (3, env.obs_dim) and obs.dtype == np.float32
    assert np.array_equal(obs[:, -3:], np.eye(3))
    total = [env.step_joint(np.zeros((3, 1)))[-1] for _ in range(4)]
    assert total == [False, False, False, True] and env.agents == []
    ant = mamujoco("Ant", "2x4")
    assert ant.action_mask.all() and ant.obs_dim > 3
    with pytest.raises(ValueError, match="missing for agent_1"):
        ant.reset(seed=0)
        ant.step({"agent_0": np.zeros(4)})
    with pytest.raises(ValueError, match="no split"):
        mamujoco("Ant", "5x5")


def test_dictionaries_and_arrays_are_the_same_steps():
    one, two = mamujoco("HalfCheetah", "2x3"), mamujoco("HalfCheetah", "2x3")
    a, (b, _) = one.reset_joint(seed=2), two.reset(seed=2)
    rng = np.random.default_rng(0)
    for _ in range(5):
        act = rng.uniform(-1, 1, (2, 3)).astype(np.float32)
        a, reward, *_ = one.step_joint(act)
        b, rewards, *_ = two.step(dict(zip(two.possible_agents, act)))
        assert np.array_equal(a, np.stack(list(b.values()))) and rewards["agent_1"] == reward


def test_actions_are_scaled_to_the_robot():
    env = mamujoco("Humanoid", "9|8")  # motors bounded by 0.4
    env.reset_joint(seed=0)
    env.step_joint(np.ones((env.n_agents, env.act_dim)))
    np.testing.assert_allclose(env.base.single_agent_env.unwrapped.data.ctrl, 0.4, rtol=1e-6)


def test_linear_policy_is_whitened_and_clipped():
    policy = LinearPolicy(np.array([[[1.0, 0.0]], [[0.0, 2.0]]]), np.zeros((2, 2)), np.array([[1.0, 1.0], [1.0, 4.0]]))
    obs = np.array([[0.5, 9.0], [9.0, 1.0]])
    assert policy(obs).tolist() == [[0.5], [0.5]]
    assert policy(np.stack([obs, 10 * obs])).shape == (2, 2, 1) and policy(10 * obs).max() == 1


def test_ars_improves_a_team_and_is_deterministic():
    seen = []
    env = mamujoco("HalfCheetah", "2x3")
    kw = dict(rounds=4, directions=6, horizon=60, seed=3)
    one, two = ars(env, **kw, progress=seen.append), ars(env, **kw)
    assert np.array_equal(one.weights, two.weights) and one.history == two.history == seen
    assert seen[-1]["steps"] == 4 * 6 * 2 * 60
    assert seen[-1]["return_mean"] > seen[0]["return_mean"]
