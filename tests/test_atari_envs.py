"""The Atari environments: details 14-20 on fake games, and the whole against the raw emulator."""

from types import SimpleNamespace

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms

import ppo_atari
from ppo_atari import (
    Args,
    ClipReward,
    Environments,
    EpisodicLife,
    FireReset,
    MaxAndSkip,
    NoopReset,
    WarpFrame,
    make_env,
)

# Breakout: FIRE and lives; Pong: FIRE, no lives; Qbert, Seaquest: lives, the latter with memory
# that is random at the start; Freeway: neither, ended here by truncation; Boxing: negative rewards.
GAMES = ("Breakout", "Pong", "Qbert", "Seaquest", "Freeway", "Boxing")
STEP_LIMIT = {"Freeway": 150, "Boxing": 180}


class FakeGame(gym.Env):
    """A scripted game: step t of game g shows the pixel 50 g + t and takes the next script row.

    A row is (reward, lives, game over); after the last row the script starts over.
    """

    def __init__(self, script=((0.0, 0, False),), meanings=("NOOP", "FIRE", "RIGHT")):
        self.observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(len(meanings))
        self.meanings, self.script = list(meanings), script
        self.calls, self.game, self.row = [], 0, 0
        self.lives_left = 3
        emulator = SimpleNamespace(__getstate__=lambda: b"random numbers")
        self.ale = SimpleNamespace(
            lives=lambda: self.lives_left, cloneState=lambda include_rng: emulator
        )

    def get_action_meanings(self):
        return self.meanings

    def frame(self):
        return np.full((210, 160, 3), (50 * self.game + self.t) % 256, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.calls.append("reset")
        self.game, self.t, self.lives_left = self.game + 1, 0, 3
        return self.frame(), {}

    def step(self, action):
        self.calls.append(int(action))
        reward, self.lives_left, over = self.script[self.row % len(self.script)]
        self.row, self.t = self.row + 1, self.t + 1
        return self.frame(), reward, over, False, {}


ALIVE = (0.0, 3, False)


# --- Detail 14 -------------------------------------------------------------------------


def test_noop_reset_presses_1_to_30_noops_and_reaches_both_ends():
    counts = set()
    game = FakeGame([ALIVE])
    env = NoopReset(game)
    for seed in range(400):
        game.calls.clear()
        game.np_random = np.random.default_rng(seed)
        env.reset()
        assert game.calls[0] == "reset" and set(game.calls[1:]) == {0}
        counts.add(len(game.calls) - 1)
    assert counts == set(range(1, 31))


def test_noop_reset_starts_over_when_the_game_ends_meanwhile():
    game = FakeGame([ALIVE, (0.0, 0, True), ALIVE, ALIVE, ALIVE])
    game.np_random = np.random.default_rng(3)
    frame, _ = NoopReset(game).reset()
    assert game.calls.count("reset") >= 2
    assert np.array_equal(frame, game.frame())


# --- Detail 15 -------------------------------------------------------------------------


def test_max_and_skip_sums_four_rewards_and_shows_the_maximum_of_the_last_two_frames():
    game = FakeGame([(float(r), 3, False) for r in (1, 2, 3, 4)])
    env = MaxAndSkip(game)
    env.reset()
    shown = iter([10, 20, 7, 5])
    game.frame = lambda: np.full((210, 160, 3), next(shown), np.uint8)
    frame, reward, terminated, truncated, _ = env.step(2)
    assert game.calls == ["reset", 2, 2, 2, 2]
    assert reward == 10.0 and not terminated and not truncated
    assert (frame == 7).all()


def test_max_and_skip_is_pixel_by_pixel():
    game = FakeGame([ALIVE])
    env = MaxAndSkip(game)
    env.reset()
    left, right = np.zeros((2, 210, 160, 3), np.uint8)
    left[:, :80], right[:, 80:] = 9, 8
    shown = iter([left, left, left, right])
    game.frame = lambda: next(shown)
    frame = env.step(0)[0]
    assert (frame[:, :80] == 9).all() and (frame[:, 80:] == 8).all()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_max_and_skip_stops_when_the_game_ends(length):
    script = [(1.0, 3, False)] * (length - 1) + [(1.0, 0, True)]
    game = FakeGame(script)
    env = MaxAndSkip(game)
    env.reset()
    frame, reward, terminated, _, _ = env.step(1)
    assert terminated and reward == length and len(game.calls) == 1 + length
    assert np.array_equal(frame, game.frame())


# --- Detail 16 -------------------------------------------------------------------------


def test_lost_life_ends_the_episode_but_not_the_game():
    game = FakeGame([(0.0, 2, False)])
    env = EpisodicLife(game)
    env.reset()
    _, _, terminated, truncated, _ = env.step(1)
    assert terminated and not truncated
    env.reset()
    assert game.calls == ["reset", 1, 0]  # a no-op instead of a second reset
    assert not env.step(1)[2]  # two lives are now the normal state


def test_zero_lives_before_the_end_of_the_game_is_no_lost_life():
    game = FakeGame([(0.0, 0, False), (0.0, 0, True)])
    env = EpisodicLife(game)
    env.reset()
    assert not env.step(1)[2]
    assert env.step(1)[2]


def test_life_gained_ends_nothing_and_its_loss_does():
    game = FakeGame([(0.0, 4, False), (0.0, 3, False)])
    env = EpisodicLife(game)
    env.reset()
    assert not env.step(1)[2]
    assert env.step(1)[2]


def test_game_that_ends_in_the_noop_step_is_reset():
    game = FakeGame([(0.0, 2, False), (0.0, 0, True), ALIVE])
    env = EpisodicLife(game)
    env.reset()
    env.step(1)
    env.reset()
    assert game.calls == ["reset", 1, 0, "reset"]
    assert not env.step(1)[2]


def test_score_is_that_of_the_whole_game_and_stands_in_the_info_of_its_end_only():
    script = [(2.0, 3, False), (5.0, 2, False), (0.5, 2, False), (0.0, 1, False), (7.0, 0, True)]
    env = EpisodicLife(FakeGame(script))
    env.reset()
    assert [env.step(1)[4] for _ in range(2)] == [{}, {}]
    env.reset()  # the next life begins with a no-op
    assert [env.step(1)[4] for _ in range(2)] == [{}, {"return": 14.5, "length": 5}]
    env.reset()
    assert env.score == {"return": 0.0, "length": 0}


# --- Detail 17 -------------------------------------------------------------------------


def test_fire_reset_presses_actions_1_and_2():
    game = FakeGame([ALIVE])
    frame, _ = FireReset(game).reset()
    assert game.calls == ["reset", 1, 2]
    assert np.array_equal(frame, game.frame())


def test_fire_is_pressed_after_a_lost_life_too():
    game = FakeGame([ALIVE, ALIVE, (0.0, 2, False), (0.0, 2, False)])
    env = FireReset(EpisodicLife(game))
    env.reset()
    env.step(0)
    game.calls.clear()
    env.reset()
    assert game.calls == [0, 1, 2]


def test_episode_that_ends_under_the_fire_press_is_reset():
    game = FakeGame([(0.0, 0, True), ALIVE])
    frame, _ = FireReset(game).reset()
    assert game.calls == ["reset", 1, "reset", 2]
    assert np.array_equal(frame, game.frame())


# --- Detail 18 -------------------------------------------------------------------------


def test_warp_frame_is_84_by_84_uint8_and_keeps_constant_grey():
    env = WarpFrame(FakeGame())
    for level in (0, 1, 77, 255):
        frame = env.observation(np.full((210, 160, 3), level, np.uint8))
        assert frame.shape == env.observation_space.shape == (84, 84)
        assert frame.dtype == np.uint8
        assert (frame == level).all()


def area_resize(image: np.ndarray, size: int) -> np.ndarray:
    """Mean over the source area that each target pixel covers, written out as two matrices."""

    def weights(source):
        edges = np.arange(size + 1) * source / size
        low = np.maximum(edges[:-1, None], np.arange(source))
        high = np.minimum(edges[1:, None], np.arange(source) + 1)
        return np.clip(high - low, 0, None) * size / source  # (size, source)

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


def test_warp_frame_is_luma_then_area_interpolation():
    screen = np.random.default_rng(0).integers(0, 256, (210, 160, 3), dtype=np.uint8)
    luma = np.rint(screen @ np.array([0.299, 0.587, 0.114]))
    frame = WarpFrame(FakeGame()).observation(screen)
    assert np.abs(frame - area_resize(luma, 84)).max() <= 1.01  # rounding of two integer steps


# --- Detail 19 -------------------------------------------------------------------------


def test_clip_reward_is_the_sign():
    env = ClipReward(FakeGame())
    assert [env.reward(r) for r in (-5, -0.1, 0, 0.1, 7)] == [-1, -1, 0, 1, 1]


# --- Detail 20, and what the container does with it -------------------------------------


def games(script, num_envs=1):
    return Environments(
        [ClipReward(WarpFrame(EpisodicLife(FakeGame(script)))) for _ in range(num_envs)]
    )


def newest(obs):
    return obs[0, :, 0, 0].tolist()


def played(envs, rng, actions):
    """Observations, rewards, terminated and truncated of each step."""
    steps = ((envs.step([action], rng), envs.obs) for action in actions)
    return [[obs.copy(), *map(np.array, outcome)] for outcome, obs in steps]


def test_frame_stack_holds_the_last_four_newest_last_and_begins_black():
    envs, rng = games([ALIVE] * 5 + [(0.0, 0, True)]), np.random.default_rng(0)
    envs.reset(rng)
    assert newest(envs.obs) == [0, 0, 0, 100]  # the game is loaded, then begun
    stacks = [newest(obs) for obs, *_ in played(envs, rng, [1] * 6)]
    assert stacks[0] == [0, 0, 100, 101] and stacks[4] == [102, 103, 104, 105]
    assert stacks[5] == [0, 0, 0, 150] and newest(envs.final_obs) == [103, 104, 105, 106]


def test_frame_stack_of_a_new_life_holds_nothing_of_the_old_one():
    envs, rng = games([ALIVE, (0.0, 2, False), (0.0, 2, False)]), np.random.default_rng(0)
    envs.reset(rng)
    envs.step([1], rng)
    _, terminated, truncated = envs.step([1], rng)
    assert terminated == (True,) and truncated == (False,)
    assert newest(envs.final_obs) == [0, 100, 101, 102] and newest(envs.obs) == [0, 0, 0, 103]
    assert envs.episodes == [] and envs.running[0]["actions"] == [1, 1]  # the game goes on


def test_finished_games_are_noted_with_their_raw_score_and_a_new_seed_begins_the_next():
    script = [(3.0, 3, False), (-8.0, 2, False), (0.0, 2, False), (1.0, 0, True)]
    envs, rng = games(script, 2), np.random.default_rng(0)
    envs.reset(rng)
    seeds = [x["seed"] for x in envs.running]
    rewards = [envs.step([1, 0], rng)[0] for _ in range(3)]
    assert rewards == [(1.0, 1.0), (-1.0, -1.0), (1.0, 1.0)]
    score = {"global_step": 6, "return": -4.0, "length": 4}  # the no-op after a life counts
    assert envs.episodes == [score, score]
    seeds += [x["seed"] for x in envs.running]
    assert len(set(seeds)) == 4 and envs.running[0]["actions"] == []


def test_steps_of_all_processes_are_counted():
    envs = Environments([WarpFrame(EpisodicLife(FakeGame([ALIVE])))], processes=3)
    envs.reset(np.random.default_rng(0))
    envs.step([0], np.random.default_rng(0))
    assert envs.global_step == 3


def test_wrappers_stand_in_the_order_of_ppo2():
    order = {}
    for game in ("Breakout", "Freeway"):
        env, layers = make_env(Args(env_id=game)), []
        while isinstance(env, gym.Wrapper):
            layers.append(type(env).__name__)
            env = env.env
        order[game] = [x for x in layers if hasattr(ppo_atari, x) or x == "TimeLimit"]
    inner = ["EpisodicLife", "TimeLimit", "MaxAndSkip", "NoopReset"]
    assert order["Breakout"] == ["ClipReward", "WarpFrame", "FireReset", *inner]
    assert order["Freeway"] == ["ClipReward", "WarpFrame", *inner]  # has no FIRE


# --- The whole against the raw emulator ---------------------------------------------------


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
        self.fire = self.buttons[1] == ale_py.Action.FIRE

    def grey(self, screen):
        grey = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)

    def new_game(self):
        self.ale.reset_game()
        for _ in range(np.random.default_rng(self.seed).integers(1, 31)):
            self.ale.act(ale_py.Action.NOOP)
        self.score, self.steps, self.lives = 0, 0, self.ale.lives()
        return self.grey(self.ale.getScreenRGB())

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
        if len(screens) > 1:
            screens[-1] = np.maximum(screens[-1], screens[-2])
        return self.grey(screens[-1]), points, over or lost, limit, over or limit

    def begin(self, new_game):
        frame = self.new_game() if new_game else self.four_frames(0)[0]
        if self.fire:
            self.four_frames(1)
            frame = self.four_frames(2)[0]
        self.stack = [np.zeros((84, 84), np.uint8)] * 3 + [frame]
        return np.stack(self.stack)

    def play(self, actions):
        rows = [(self.begin(True), None)]
        for action in actions:
            frame, points, terminated, truncated, over = self.four_frames(action)
            self.stack = [*self.stack[1:], frame]
            final = np.stack(self.stack)
            if over:
                self.episodes.append((float(self.score), self.steps))
                self.seed = int(self.seeds.integers(2**31))
            if terminated or truncated:
                self.begin(over)
            sign = float((points > 0) - (points < 0))
            outcome = (sign, terminated, truncated, final if terminated or truncated else None)
            rows.append((np.stack(self.stack), outcome))
        return rows


@pytest.mark.parametrize(
    ("game", "steps"),
    [("Breakout", 500), *(pytest.param(game, 3000, marks=pytest.mark.slow) for game in GAMES)],
)
def test_environments_equal_a_raw_emulator_bit_for_bit(game, steps, monkeypatch):
    if game in STEP_LIMIT:
        monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", STEP_LIMIT[game])
    envs, rng = Environments([make_env(Args(env_id=game))]), np.random.default_rng(7)
    actions = np.random.default_rng(1).integers(0, envs.envs[0].action_space.n, steps).tolist()
    raw = RawGame(game, np.random.default_rng(7), ppo_atari.MAX_GAME_STEPS)
    (first, _), *expected = raw.play(actions)
    envs.reset(rng)
    assert np.array_equal(envs.obs, first[None])
    ends = set()
    for action, (raw_obs, (*raw_flags, raw_final)) in zip(actions, expected, strict=True):
        flags = envs.step([action], rng)
        assert [x[0] for x in flags] == raw_flags
        assert np.array_equal(envs.obs[0], raw_obs)
        assert raw_final is None or np.array_equal(envs.final_obs[0], raw_final)
        ends.add((flags[1][0], flags[2][0]))
    assert [(x["return"], x["length"]) for x in envs.episodes] == raw.episodes != []
    assert ((False, True) in ends) == (game in STEP_LIMIT)


# --- Games that go on after a restart ------------------------------------------------------


def breakout(**settings):
    return Environments([make_env(Args(**{"env_id": "Breakout", **settings}))])


def saved_state(envs):
    """What a checkpoint holds, which later steps leave alone."""
    state = envs.state()
    return {**state, "obs": state["obs"].clone(), "episodes": list(state["episodes"])}


@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_replayed_game_goes_on_bit_for_bit_through_lost_lives(game, sticky):
    settings = {"env_id": game, "sticky_actions": sticky}
    envs, other = breakout(**settings), breakout(**settings)
    rng, actions = np.random.default_rng(1), np.random.default_rng(2)
    envs.reset(rng)
    lost, buttons = 0, envs.envs[0].action_space.n
    while not (envs.episodes and lost):  # in a later game and a later life
        _, _, terminated, _ = played(envs, rng, actions.integers(buttons, size=1))[0]
        lost = (lost + terminated[0]) * (len(envs.running[0]["actions"]) > 0)
    state, before = saved_state(envs), rng.bit_generator.state
    assert other.replay(state) and other.episodes == envs.episodes
    more = actions.integers(buttons, size=300)
    first = played(envs, rng, more)
    rng.bit_generator.state = before
    second = played(other, rng, more)
    assert all(np.array_equal(a, b) for x, y in zip(first, second) for a, b in zip(x, y))
    assert envs.episodes == other.episodes
    assert envs.envs[0].get_wrapper_attr("score") == other.envs[0].get_wrapper_attr("score")


def test_failed_replay_begins_new_games_as_a_fresh_run_does(capsys):
    envs, other, fresh = breakout(), breakout(), breakout()
    rng = np.random.default_rng(1)
    envs.reset(rng)
    played(envs, rng, [1, 2, 3] * 5)
    state = saved_state(envs)
    state["obs"] = state["obs"] + 1
    assert not other.replay(state)
    assert "do not repeat themselves: new ones begin" in capsys.readouterr().out
    for x in (other, fresh):
        x.reset(np.random.default_rng(5))
    assert np.array_equal(other.obs, fresh.obs)
    assert other.envs[0].get_wrapper_attr("score")["length"] == 2  # the presses that begin it


def test_sticky_actions_repeat_the_previous_action():
    """Nothing is pressed but FIRE at the beginning; a sticky emulator goes on pressing it."""
    ends = set()
    for sticky in (0.0, 0.9):
        envs = Environments([make_env(Args(env_id="SpaceInvaders", sticky_actions=sticky))])
        envs.reset(np.random.default_rng(3))
        assert envs.envs[0].unwrapped.ale.getFloat("repeat_action_probability") == np.float32(
            sticky
        )
        ends.add(np.sum(played(envs, np.random.default_rng(4), [2, 3] * 20)[-1][0]))
    assert len(ends) == 2


# --- Names of games --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Pong", "PongNoFrameskip-v4", "ALE/Pong-v5", "Pong-v5"])
def test_names_of_one_game_are_one_name(name):
    assert Args(env_id=name).env_id == "Pong"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Breakuot", "Breakout"),
        ("pong", "Pong"),
        ("CartPole-v1", "CartPole-v1"),
        ("VideoCheckers", "no-op"),
    ],
)
def test_other_environments_are_refused_with_a_hint(name, hint):
    with pytest.raises(ValueError, match=hint):
        make_env(Args(env_id=name))


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    # 14 no-op reset
    ("integers(1, NOOP_MAX + 1)", "integers(0, NOOP_MAX + 1)", "1_to_30"),
    ("integers(1, NOOP_MAX + 1)", "integers(1, NOOP_MAX)", "1_to_30"),
    ("self.env.step(0)\n            if terminated or truncated:",
     "self.env.step(0)\n            if False:", "ends_meanwhile"),
    # 15 max and skip
    ("np.maximum(frames[-1], frames[-2:][0])", "frames[-1]", "maximum or pixel"),
    ("np.maximum(frames[-1], frames[-2:][0])", "np.maximum.reduce(frames)", "maximum"),
    ("FRAME_SKIP = 4", "FRAME_SKIP = 3", "sums_four"),
    ("total_reward += float(reward)", "total_reward = float(reward)", "sums_four"),
    # 16 episodic life
    ("terminated or 0 < lives < self.lives", "terminated or lives < self.lives", "zero_lives"),
    ("terminated or 0 < lives < self.lives", "terminated", "lost_life"),
    ("self.lives = lives\n", "pass\n", "life_gained"),
    ("if not self.game_over:\n            frame", "if False:\n            frame", "lost_life"),
    ("self.score if self.game_over else {}", "self.score", "whole_game"),
    # 17 fire reset
    ("for action in (1, 2):", "for action in (1,):", "presses_actions"),
    ('== "FIRE":', '== "FIRES":', "order_of_ppo2"),
    # 18 warp frame
    ("cv2.COLOR_RGB2GRAY", "cv2.COLOR_BGR2GRAY", "luma"),
    ("cv2.INTER_AREA", "cv2.INTER_NEAREST", "luma"),
    # 19 reward clipping
    ("float(np.sign(reward))", "float(np.clip(reward, -1, 1))", "is_the_sign"),
    # 20 frame stack
    ("np.concatenate([self.obs[i, 1:], frame[None]])",
     "np.concatenate([frame[None], self.obs[i, :-1]])", "frame_stack"),
    ("self.obs[i] = 0", "self.obs[i] = self.obs[i, -1]", "frame_stack"),
    ("if not score:\n                self.begin_life(i)", "self.begin_life(i)", "bit_for_bit"),
    # The container
    ("self.episodes.append({\"global_step\": self.global_step, **score})", "pass", "raw_score"),
    ("len(self.envs) * self.processes", "len(self.envs)", "all_processes"),
    ("env.set_wrapper_attr(\"game_over\", True)", "pass", "failed_replay"),
    ("ale.restoreState(ALEState(running[\"emulator\"]))", "ale", "through_lost_lives"),
    ("repeat_action_probability=args.sticky_actions", "repeat_action_probability=0.0", "sticky"),
    ("game.np_random = np.random.default_rng(seed)", "pass", "emulator or lives"),
]  # fmt: skip
