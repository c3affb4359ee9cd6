"""The Atari environments: the same as on the raw emulator, bit for bit.

That comparison has all of the details 14-20; fake games add what happens seldom.
"""

import copy
from types import SimpleNamespace

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms

import ppo_atari as ppo

# Breakout: FIRE and lives; Pong: FIRE, no lives; Qbert, Seaquest: lives, the latter with memory
# that is random at the start; Freeway: neither, ended here by truncation; Boxing: negative rewards.
GAMES = ("Breakout", "Pong", "Qbert", "Seaquest", "Freeway", "Boxing")
STEP_LIMIT = {"Freeway": 150, "Boxing": 180}


class FakeGame(gym.Env):
    """A scripted game: step t of game g shows the pixel 50 g + t and takes the next script row.

    A row is (reward, lives, game over); after the last row the script starts over.
    """

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, *script):
        self.script, self.calls, self.game, self.row = script, [], 0, 0
        emulator = SimpleNamespace(__getstate__=lambda: b"random numbers")
        self.ale = SimpleNamespace(cloneState=lambda include_rng: emulator)
        self.ale.restoreState = lambda state: None
        self.ale.lives = lambda: self.lives_left

    def frame(self):
        return np.full((210, 160, 3), (50 * self.game + self.t) % 256, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.calls.append("reset")
        self.game, self.t, self.lives_left = self.game + 1, 0, 3
        return self.frame(), {}

    def step(self, action):
        self.calls.append(int(action))
        reward, self.lives_left, over = self.script[self.row % len(self.script)]
        self.row, self.t = self.row + 1, self.t + 1
        return self.frame(), reward, over, False, {}


ALIVE = (0.0, 3, False)
LOST = (0.0, 2, False)
OVER = (0.0, 0, True)


def begun(wrapper, *script):
    """A wrapped game after its first reset."""
    env = wrapper(FakeGame(*script))
    env.reset()
    return env


# --- Details 14-19: the wrappers ---


def test_noop_reset_presses_1_to_30_noops_and_reaches_both_ends():
    counts, env = set(), ppo.NoopReset(FakeGame(ALIVE))
    for seed in range(400):
        env.unwrapped.calls.clear()
        env.unwrapped.np_random = np.random.default_rng(seed)
        env.reset()
        first, *others = env.unwrapped.calls
        assert first == "reset" and set(others) == {0}
        counts.add(len(others))
    assert counts == set(range(1, 31))


def test_noop_reset_starts_over_when_the_game_ends_meanwhile():
    game = FakeGame(ALIVE, OVER, ALIVE, ALIVE, ALIVE)
    game.np_random = np.random.default_rng(3)
    frame, _ = ppo.NoopReset(game).reset()
    assert game.calls.count("reset") >= 2
    assert np.array_equal(frame, game.frame())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_max_and_skip_stops_when_the_game_ends(length):
    env = begun(ppo.MaxAndSkip, *[(1.0, 3, False)] * (length - 1), (1.0, 0, True))
    frame, reward, terminated, _, _ = env.step(1)
    assert terminated and reward == length and len(env.unwrapped.calls) == 1 + length
    assert np.array_equal(frame, env.unwrapped.frame())


@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        ([LOST], [True]),
        ([(0.0, 0, False), OVER], [False, True]),  # a game may linger at 0 lives
        ([(0.0, 4, False), ALIVE], [False, True]),  # a life gained ends nothing, its loss does
    ],
)
def test_an_episode_ends_with_each_lost_life_and_with_the_game(rows, ends):
    env = begun(ppo.EpisodicLife, *rows)
    assert [env.step(1)[2:4] for _ in ends] == [(x, False) for x in ends]


@pytest.mark.parametrize("rows", [(LOST, LOST, LOST), (LOST, OVER, ALIVE)])
def test_a_life_begins_with_a_noop_and_with_a_reset_if_that_ends_the_game(rows):
    env = begun(ppo.EpisodicLife, *rows)
    env.step(1)
    env.reset()
    assert env.unwrapped.calls == ["reset", 1, 0] + ["reset"] * (OVER in rows)
    assert not env.step(1)[2]  # the lives that are left are now the normal state


def test_episode_that_ends_under_the_fire_press_is_reset():
    game = FakeGame(OVER, ALIVE)
    frame, _ = ppo.FireReset(game).reset()
    assert game.calls == ["reset", 1, "reset", 2]
    assert np.array_equal(frame, game.frame())


def stacked(env):
    """A game as the container wants it, below which stands the rest of the wrappers."""
    env = ppo.ClipReward(ppo.WarpFrame(env))
    return gym.wrappers.FrameStackObservation(env, ppo.NUM_FRAMES, padding_type="zero")


@pytest.mark.parametrize("press", range(3))  # the no-op, FIRE, action 2
def test_a_game_that_ends_under_a_press_that_begins_a_life_is_noted(press, monkeypatch):
    """Once, also by a resumed run, which plays the press again."""
    monkeypatch.setattr(ale_py, "ALEState", bytes)
    presses = [(1.0, 2, False)] * press + [(5.0, 0, True)]
    script = [ALIVE, ALIVE, LOST, *presses, *[ALIVE] * 20]
    envs, other = (
        ppo.Environments([stacked(ppo.FireReset(ppo.EpisodicLife(FakeGame(*script))))])
        for _ in range(2)
    )
    rng = np.random.default_rng(0)
    envs.reset(rng)
    envs.step([0], rng)
    game = {"global_step": 1, "return": press + 5.0, "length": 4 + press}
    assert envs.episodes == [game]
    envs.step([0], rng)
    other.envs[0].unwrapped.game = 1  # as `reset` has already loaded the first one of `envs`
    assert other.replay(copy.deepcopy(envs.state()))
    for x in (envs, other):
        for _ in range(60):
            x.step([0], rng)
        assert x.episodes[0] == game
        assert len(x.episodes) == x.envs[0].unwrapped.game - 2 > 1  # one runs, one was loaded


def test_clip_reward_is_the_sign():
    env = ppo.ClipReward(FakeGame())
    assert [env.reward(r) for r in (-5, -0.1, 0, 0.1, 7)] == [-1, -1, 0, 1, 1]


# --- The container, and the order of the wrappers ---


def test_finished_games_are_noted_with_their_raw_score_and_a_new_seed_begins_the_next():
    """At the step of all three processes."""
    script = [(3.0, 3, False), (-8.0, 2, False), (0.0, 2, False), (1.0, 0, True)]
    games = [ppo.EpisodicLife(FakeGame(*script)) for _ in range(2)]
    envs = ppo.Environments([stacked(x) for x in games], processes=3)
    rng = np.random.default_rng(0)
    envs.reset(rng)
    seeds = [x["seed"] for x in envs.running]
    rewards = [envs.step([1, 0], rng)[0] for _ in range(3)]
    assert np.array(rewards).T.tolist() == [[1.0, -1.0, 1.0]] * 2
    score = {"global_step": 18, "return": -4.0, "length": 4}  # the no-op after a life counts
    assert envs.episodes == [score, score]
    seeds += [x["seed"] for x in envs.running]
    assert len(set(seeds)) == 4 and envs.running[0]["actions"] == []


# --- The whole against the raw emulator ---


class RawGame:
    """ppo2's rules once more, as plain statements on ALEInterface: the independent replay."""

    def __init__(self, game, rng, step_limit):
        self.seeds, self.step_limit, self.episodes = rng, step_limit, []
        self.seed = int(rng.integers(2**31))
        self.ale = ale_py.ALEInterface()
        self.ale.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale.setFloat("repeat_action_probability", 0.0)
        rom_seed = np.random.SeedSequence(self.seed).generate_state(2)[1]
        self.ale.setInt("random_seed", np.int32(rom_seed))
        self.ale.loadROM(roms.get_rom_path(game.lower()))
        self.ale.reset_game()
        self.buttons = self.ale.getMinimalActionSet()

    def grey(self, screen):
        grey = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)

    def four_frames(self, action):
        screens, points = [], 0
        for _ in range(4):
            points += self.ale.act(self.buttons[action])
            screens.append(self.ale.getScreenRGB())
            if self.ale.game_over():
                break
        self.score, self.steps = self.score + points, self.steps + 1
        over, limit = self.ale.game_over(), self.steps >= self.step_limit
        lost = 0 < self.ale.lives() < self.lives
        self.lives = self.ale.lives()
        frame = self.grey(np.maximum.reduce(screens[-2:]))
        return frame, points, over or lost, limit, over or limit

    def begin(self, new_game):
        if new_game:
            self.ale.reset_game()
            for _ in range(np.random.default_rng(self.seed).integers(1, 31)):
                self.ale.act(ale_py.Action.NOOP)
            self.score, self.steps, self.lives = 0, 0, self.ale.lives()
            frame = self.grey(self.ale.getScreenRGB())
        else:
            frame = self.four_frames(0)[0]
        if self.buttons[1] == ale_py.Action.FIRE:
            self.four_frames(1)
            frame = self.four_frames(2)[0]
        self.stack = np.stack([*np.zeros((3, 84, 84), np.uint8), frame])

    def play(self, actions):
        """The stack after each action, that at the end of a life or game, and what a step says."""
        for action in actions:
            frame, points, terminated, truncated, over = self.four_frames(action)
            final = self.stack = np.stack([*self.stack[1:], frame])
            if over:
                self.episodes.append((float(self.score), self.steps))
                self.seed = int(self.seeds.integers(2**31))
            if terminated or truncated:
                self.begin(over)
            yield self.stack, final, [np.sign(points), terminated, truncated]


@pytest.mark.parametrize(
    ("game", "steps"),
    [("Breakout", 500), *(pytest.param(game, 3000, marks=pytest.mark.slow) for game in GAMES)],
)
def test_environments_equal_a_raw_emulator_bit_for_bit(game, steps, monkeypatch):
    monkeypatch.setattr(ppo, "MAX_GAME_STEPS", STEP_LIMIT.get(game, ppo.MAX_GAME_STEPS))
    envs, rng = ppo.Environments([ppo.make_env(ppo.Args(env_id=game))]), np.random.default_rng(7)
    actions = np.random.default_rng(1).integers(0, envs.envs[0].action_space.n, steps).tolist()
    raw, ends = RawGame(game, np.random.default_rng(7), ppo.MAX_GAME_STEPS), set()
    raw.begin(new_game=True)
    envs.reset(rng)
    assert np.array_equal(envs.obs[0], raw.stack)
    for action, (stack, final, outcome) in zip(actions, raw.play(actions), strict=True):
        assert [x[0] for x in envs.step([action], rng)] == outcome
        assert np.array_equal(envs.obs[0], stack)
        assert not any(outcome[1:]) or np.array_equal(envs.final_obs[0], final)
        ends.add(tuple(outcome[1:]))
    assert [(x["return"], x["length"]) for x in envs.episodes] == raw.episodes != []
    assert ((False, True) in ends) == (game in STEP_LIMIT)


# --- Games that go on after a restart ---


def played(envs, rng, actions):
    """Observations, rewards, terminated and truncated of each step."""
    steps = ((envs.step([action], rng), envs.obs) for action in actions)
    return [[obs.copy(), *map(np.array, outcome)] for outcome, obs in steps]


@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_replayed_game_goes_on_bit_for_bit_through_lost_lives(game, sticky):
    args = ppo.Args(env_id=game, sticky_actions=sticky)
    envs, other = (ppo.Environments([ppo.make_env(args)]) for _ in range(2))
    rng, actions = np.random.default_rng(1), np.random.default_rng(2)
    envs.reset(rng)
    lost, buttons = 0, envs.envs[0].action_space.n
    while not (envs.episodes and lost):  # in a later game and a later life
        _, _, terminated, _ = played(envs, rng, actions.integers(buttons, size=1))[0]
        lost = (lost + terminated[0]) * (len(envs.running[0]["actions"]) > 0)
    assert other.replay(copy.deepcopy(envs.state())) and other.episodes == envs.episodes
    before, more = rng.bit_generator.state, actions.integers(buttons, size=300)
    first = played(envs, rng, more)
    rng.bit_generator.state = before
    second = played(other, rng, more)
    assert all(np.array_equal(a, b) for x, y in zip(first, second) for a, b in zip(x, y))
    assert envs.episodes == other.episodes
    assert envs.envs[0].get_wrapper_attr("score") == other.envs[0].get_wrapper_attr("score")


def test_failed_replay_begins_new_games_as_a_fresh_run_does(capsys):
    envs, other, fresh = (ppo.Environments([ppo.make_env(ppo.Args())]) for _ in range(3))
    rng = np.random.default_rng(1)
    envs.reset(rng)
    played(envs, rng, [1, 2, 3] * 5)
    state = envs.state()
    assert not other.replay({**state, "obs": state["obs"] + 1})
    assert "do not repeat themselves: new ones begin" in capsys.readouterr().out
    for x in (other, fresh):
        x.reset(np.random.default_rng(5))
    assert np.array_equal(other.obs, fresh.obs)
    assert other.envs[0].get_wrapper_attr("score")["length"] == 2  # the presses that begin it


def test_sticky_actions_reach_the_emulator():
    ale = ppo.make_env(ppo.Args(sticky_actions=0.75)).unwrapped.ale
    assert ale.getFloat("repeat_action_probability") == 0.75


# --- Names of games ---


@pytest.mark.parametrize("name", ["Pong", "PongNoFrameskip-v4", "ALE/Pong-v5", "Pong-v5"])
def test_names_of_one_game_are_one_name(name):
    assert ppo.Args(env_id=name).env_id == "Pong"


@pytest.mark.parametrize(
    ("name", "hint"), [("Breakuot", "Breakout"), ("pong", "Pong"), ("VideoCheckers", "no-op")]
)
def test_other_environments_are_refused_with_a_hint(name, hint):
    with pytest.raises(ValueError, match=hint):
        ppo.make_env(ppo.Args(env_id=name))


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    # 14 no-op reset
    ("integers(1, NOOP_MAX + 1)", "integers(0, NOOP_MAX + 1)", "1_to_30"),
    ("integers(1, NOOP_MAX + 1)", "integers(1, NOOP_MAX)", "1_to_30"),
    # 15 max and skip
    ("np.maximum(frames[-1], frames[-2:][0])", "frames[-1]", "bit_for_bit"),
    ("np.maximum(frames[-1], frames[-2:][0])", "np.maximum.reduce(frames)", "bit_for_bit"),
    ("FRAME_SKIP = 4", "FRAME_SKIP = 3", "bit_for_bit"),
    # 16 episodic life
    ("terminated or 0 < lives < self.lives", "terminated or lives < self.lives", "each_lost_life"),
    ("terminated or 0 < lives < self.lives", "terminated", "each_lost_life"),
    ("self.lives = lives\n", "pass\n", "each_lost_life"),
    # 17 fire reset
    ("for action in (1, 2):", "for action in (1,):", "bit_for_bit"),
    # 18 warp frame
    ("cv2.COLOR_RGB2GRAY", "cv2.COLOR_BGR2GRAY", "bit_for_bit"),
    ("cv2.INTER_AREA", "cv2.INTER_NEAREST", "bit_for_bit"),
    # 19 reward clipping
    ("float(np.sign(reward))", "float(np.clip(reward, -1, 1))", "is_the_sign"),
    # 20 frame stack
    ("padding_type=\"zero\"", "padding_type=\"reset\"", "bit_for_bit"),
    # The container
    ("env.set_wrapper_attr(\"game_over\", True)", "pass", "failed_replay"),
    ("ale.restoreState(ALEState(running[\"emulator\"]))", "ale", "through_lost_lives"),
]  # fmt: skip
