"""The Atari environments: details 14-20 on fake games, and both paths against the raw emulator."""

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import ppo_atari
from ppo_atari import (
    AleGame,
    AleVectorEnv,
    Args,
    ClipReward,
    EpisodeStatistics,
    EpisodicLife,
    FireReset,
    FrameStack,
    MaxAndSkip,
    NoopReset,
    RunError,
    WarpFrame,
    find_game,
    make_env,
    make_envs,
)

# Breakout: FIRE and lives; Pong: FIRE, no lives; Qbert, Seaquest: lives; Freeway: neither, ended
# here by truncation; Boxing: negative rewards.
GAMES = {
    "Breakout": 500,
    "Pong": 1300,
    "Qbert": 700,
    "Seaquest": 500,
    "Freeway": 400,
    "Boxing": 500,
}
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
        self.ale = SimpleNamespace(lives=lambda: self.lives_left)

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
        env.reset(seed=seed)
        assert game.calls[0] == "reset" and set(game.calls[1:]) == {0}
        counts.add(len(game.calls) - 1)
    assert counts == set(range(1, 31))


def test_noop_reset_starts_over_when_the_game_ends_meanwhile():
    game = FakeGame([ALIVE, (0.0, 0, True), ALIVE, ALIVE, ALIVE])
    frame, _ = NoopReset(game).reset(seed=3)
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


def test_last_life_resets_the_game():
    game = FakeGame([(0.0, 0, True)])
    env = EpisodicLife(game)
    env.reset()
    assert env.step(1)[2]
    env.reset()
    assert game.calls == ["reset", 1, "reset"]


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


def test_seeded_reset_always_starts_a_new_game():
    game = FakeGame([(0.0, 2, False)])
    env = EpisodicLife(game)
    env.reset()
    env.step(1)
    env.reset(seed=5)
    assert game.calls == ["reset", 1, "reset"]


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


@pytest.mark.parametrize(
    ("game", "fires"), [("Breakout", True), ("Pong", True), ("Freeway", False)]
)
def test_fire_reset_is_applied_where_action_1_is_fire(game, fires):
    env = make_env(Args(env_id=game), 0)()
    layers = []
    while isinstance(env, gym.Wrapper):
        layers.append(type(env))
        env = env.env
    assert (FireReset in layers) == fires
    assert (AleVectorEnv(game.lower(), 1, 0.0).games[0].fire) == fires


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


def test_sign_is_taken_of_the_sum_over_the_skipped_frames():
    env = ClipReward(MaxAndSkip(FakeGame([(r, 3, False) for r in (1.0, -3.0, 1.0, 0.5)])))
    env.reset()
    assert env.step(0)[1] == -1.0


# --- Detail 20 -------------------------------------------------------------------------


def counting_envs(num_envs: int, size: int) -> FrameStack:
    """Games whose frames are 50 g + t and that end after 5 steps."""
    script = [ALIVE] * 4 + [(0.0, 0, True)]

    def thunk():
        return WarpFrame(FakeGame(script))

    envs = SyncVectorEnv([thunk] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    return FrameStack(envs, size)


def test_frame_stack_holds_the_last_four_newest_last_and_fills_with_zeros():
    envs = counting_envs(2, 4)
    obs, _ = envs.reset(seed=0)
    seen = [obs[0, :, 0, 0].tolist()]
    for _ in range(7):
        obs, _, _, _, infos = envs.step(np.zeros(2, int))
        seen.append(obs[0, :, 0, 0].tolist())
        if "final_obs" in infos:
            final = infos["final_obs"][1][:, 0, 0].tolist()
    assert obs.shape == envs.observation_space.shape == (2, 4, 84, 84)
    assert seen[:5] == [
        [0, 0, 0, 50],
        [0, 0, 50, 51],
        [0, 50, 51, 52],
        [50, 51, 52, 53],
        [51, 52, 53, 54],
    ]
    assert final == [52, 53, 54, 55]  # the ended episode's stack, its last frame included
    assert seen[5:] == [[0, 0, 0, 100], [0, 0, 100, 101], [0, 100, 101, 102]]  # nothing of game 1


def test_frame_stack_returns_arrays_that_later_steps_leave_alone():
    envs = counting_envs(1, 4)
    kept = [envs.reset(seed=0)[0]]
    copies = [kept[0].copy()]
    for _ in range(6):
        kept.append(envs.step(np.zeros(1, int))[0])
        copies.append(kept[-1].copy())
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_stack_of_one_frame_is_the_frame():
    envs = counting_envs(1, 1)
    envs.reset(seed=0)
    values = [envs.step(np.zeros(1, int))[0][0, :, 0, 0].tolist() for _ in range(6)]
    assert values == [[51], [52], [53], [54], [100], [101]]


# --- Whole-game statistics and wrapper order -------------------------------------------


def test_statistics_are_those_of_the_raw_whole_game():
    script = [(5.0, 2, False), (-2.0, 1, False), (7.0, 0, True)]
    env = ClipReward(EpisodicLife(EpisodeStatistics(FakeGame(script))))
    env.reset()
    infos = []
    for _ in range(3):
        _, reward, terminated, _, info = env.step(1)
        infos.append((reward, terminated, info.get("episode")))
    assert infos == [(1, True, None), (-1, True, None), (1, True, {"r": 10.0, "l": 3})]


def test_wrappers_stand_in_the_order_of_ppo2():
    env, layers = make_env(Args(env_id="Breakout"), 0)(), []
    while isinstance(env, gym.Wrapper):
        layers.append(type(env).__name__)
        env = env.env
    ours = [name for name in layers if hasattr(ppo_atari, name) or name == "TimeLimit"]
    assert ours == [
        "ResumableGame",
        "ClipReward",
        "WarpFrame",
        "FireReset",
        "EpisodicLife",
        "EpisodeStatistics",
        "TimeLimit",
        "MaxAndSkip",
        "NoopReset",
    ]


# --- Both paths against the raw emulator -----------------------------------------------


def limit_steps(monkeypatch, game):
    if game in STEP_LIMIT:
        monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", STEP_LIMIT[game])


def record(envs, actions, seed):
    """Run one environment over `actions`; everything the learner sees, and the raw returns."""
    obs, _ = envs.reset(seed=[seed])
    rows, episodes = [(obs[0].copy(), 0.0, False, False, None)], []
    for action in actions:
        obs, reward, terminated, truncated, infos = envs.step(np.array([action]))
        done = bool(terminated[0] or truncated[0])
        final = infos["final_obs"][0] if done else None
        rows.append(
            (obs[0].copy(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), final)
        )
        if done and "episode" in infos["final_info"]:
            episode = infos["final_info"]["episode"]
            episodes.append((float(episode["r"][0]), int(episode["l"][0])))
    return rows, episodes


class RawGame:
    """ppo2's rules once more, as plain statements on ALEInterface: the independent replay."""

    def __init__(self, game, seed, step_limit):
        rom_seed = np.random.SeedSequence(seed).generate_state(2)
        self.rng = np.random.Generator(np.random.PCG64(int(rom_seed[0])))
        self.ale = ale_py.ALEInterface()
        self.ale.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("random_seed", np.int32(np.uint32(rom_seed[1])))
        self.ale.loadROM(roms.get_rom_path(game.lower()))
        self.buttons = self.ale.getMinimalActionSet()
        self.fire = self.buttons[1] == ale_py.Action.FIRE
        self.step_limit = step_limit
        self.stack = [np.zeros((84, 84), np.uint8)] * 4
        self.episodes = []

    def grey(self, screen):
        grey = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)

    def new_game(self):
        self.ale.reset_game()
        for _ in range(self.rng.integers(1, 31)):
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
        rows = [(self.begin(True), 0.0, False, False, None)]
        for action in actions:
            frame, points, terminated, truncated, over = self.four_frames(action)
            self.stack, final = [*self.stack[1:], frame], None
            if over:
                self.episodes.append((float(self.score), self.steps))
            if terminated or truncated:
                final = np.stack(self.stack)
                self.begin(over)
            sign = float((points > 0) - (points < 0))
            rows.append((np.stack(self.stack), sign, terminated, truncated, final))
        return rows


@pytest.mark.parametrize("game", GAMES)
def test_reference_path_equals_raw_replay_bitwise(game, monkeypatch):
    limit_steps(monkeypatch, game)
    envs = make_envs(Args(env_id=game, num_envs=1, async_envs=False))
    actions = np.random.default_rng(1).integers(0, envs.single_action_space.n, GAMES[game])
    rows, episodes = record(envs, actions, seed=7)
    raw = RawGame(game, 7, ppo_atari.MAX_GAME_STEPS)
    expected = raw.play(actions)
    for (obs, *flags, final), (raw_obs, *raw_flags, raw_final) in zip(rows, expected, strict=True):
        assert flags == raw_flags
        assert np.array_equal(obs, raw_obs)
        assert (final is None) == (raw_final is None)
        assert final is None or np.array_equal(final, raw_final)
    assert episodes == raw.episodes
    assert episodes, "the run must contain the end of a game"
    kinds = {(row[2], row[3]) for row in rows}
    assert ((False, True) in kinds) == (game in STEP_LIMIT)


class FixedNoops:
    """Stands in for the generator of NoopReset, to repeat the fast path's draws."""

    def __init__(self, noops):
        self.noops = iter(noops)

    def integers(self, low, high):
        noops = next(self.noops)
        assert low <= noops < high
        return noops


@pytest.mark.parametrize("game", GAMES)
def test_fast_path_equals_reference_path(game, monkeypatch):
    limit_steps(monkeypatch, game)
    args = Args(env_id=game, num_envs=1, env_backend="ale")
    fast = make_envs(args)
    actions = np.random.default_rng(2).integers(0, fast.single_action_space.n, GAMES[game])
    emulator, noops = fast.env.games[0].emulator, []
    reset = emulator.reset

    def recording_reset(**kwargs):
        frame, info = reset(**kwargs)
        if info["episode_frame_number"][0] > 0:
            noops.append(int(info["episode_frame_number"][0]))
        return frame, info

    monkeypatch.setattr(emulator, "reset", recording_reset)
    rows, episodes = record(fast, actions, seed=3)

    reference = make_envs(replace(args, env_backend="gymnasium", async_envs=False))
    assert reference.single_action_space == fast.single_action_space
    raw_env = reference.env.envs[0].unwrapped
    seeded_reset = raw_env.reset

    def reset_without_reseeding(*, seed=None, options=None):
        result = seeded_reset(seed=seed, options=options)
        if seed is not None:
            raw_env._np_random = FixedNoops(noops)
        return result

    monkeypatch.setattr(raw_env, "reset", reset_without_reseeding)
    expected, expected_episodes = record(reference, actions, seed=3)
    assert len(noops) == len(expected_episodes) + 1 >= 2
    assert episodes == expected_episodes
    worst, total = 0, []
    for (obs, *flags, final), (ref_obs, *ref_flags, ref_final) in zip(rows, expected, strict=True):
        assert flags == ref_flags
        assert (final is None) == (ref_final is None)
        # The emulator drops the last frames of a game that is over; nothing is bootstrapped there.
        truncated = flags[2] and not flags[1]
        for a, b in ((obs, ref_obs), (final, ref_final))[: 1 + truncated]:
            difference = np.abs(a.astype(int) - b)
            worst = max(worst, difference.max())
            total.append(difference.mean())
    print(game, "grey levels apart: largest", worst, "mean", np.mean(total))
    assert worst <= 29 and np.mean(total) < 0.04


def test_several_games_on_the_fast_path_are_played_apart(monkeypatch):
    """Each as it is played alone: observations, rewards, ends, last observations and scores."""
    monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", 25)
    args = Args(env_id="Breakout", env_backend="ale", num_envs=2)
    actions = np.random.default_rng(0).integers(0, 4, (90, 2))

    def play(games):
        envs = make_envs(replace(args, num_envs=len(games), num_minibatches=1))
        obs, _ = envs.reset(seed=[5 + game for game in games])
        rows = [[obs[i].tobytes()] for i in range(len(games))]
        for action in actions[:, games]:
            obs, *flags, infos = envs.step(action)
            for i, row in enumerate(rows):
                ended = flags[1][i] or flags[2][i]
                row.append((obs[i].tobytes(), *(flag[i] for flag in flags)))
                if ended:
                    row.append(infos["final_obs"][i].tobytes())
                    games_over = infos.get("final_info", {})
                    if games_over and games_over["_episode"][i]:
                        row.append([games_over["episode"][key][i] for key in "rl"])
        envs.close()
        return rows

    together = play([0, 1])
    assert together == [*play([0]), *play([1])]
    assert together[0] != together[1] and any(isinstance(x, list) for x in together[1])


# --- Vectorization, names, sticky actions, resumption ----------------------------------


def rollout(args, first_seed=0, steps=40):
    """Observations, rewards and flags of random play, for equality checks."""
    envs = make_envs(args)
    try:
        rows = [envs.reset(seed=[first_seed + i for i in range(args.num_envs)])[0]]
        actions = np.random.default_rng(0).integers(0, envs.single_action_space.n, (steps, 2))
        for action in actions:
            rows += envs.step(action)[:4]
    finally:
        envs.close()
    return rows


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_processes_give_what_one_process_gives():
    args = Args(env_id="Breakout", num_envs=2)
    assert equal(rollout(replace(args, async_envs=False)), rollout(replace(args, async_envs=True)))


@pytest.mark.parametrize("backend", ["gymnasium", "ale"])
def test_sub_environments_differ_and_seeds_repeat(backend):
    args = Args(env_id="Breakout", num_envs=2, async_envs=False, env_backend=backend)
    first = rollout(args, first_seed=2**32 - 2)  # the largest that environment_seeds draws
    assert equal(first, rollout(args, first_seed=2**32 - 2))
    assert not np.array_equal(first[-4][0], first[-4][1])


@pytest.mark.parametrize("backend", ["gymnasium", "ale"])
def test_sticky_actions_repeat_the_previous_action(backend):
    """With probability 1 the first button, a no-op, is held for ever, whatever is pressed."""
    args = Args(env_id="Pong", num_envs=1, async_envs=False, env_backend=backend)
    for sticky, same in ((1.0, True), (0.0, False)):
        shown = []
        for action in (2, 3):
            envs = make_envs(replace(args, sticky_actions=sticky))
            envs.reset(seed=[0])
            for _ in range(12):
                obs = envs.step(np.array([action]))[0]
            shown.append(obs)
            envs.close()
        assert np.array_equal(*shown) == same


@pytest.mark.parametrize(
    ("given", "game"),
    [
        ("Breakout", "Breakout"),
        ("BreakoutNoFrameskip-v4", "Breakout"),
        ("ALE/Breakout-v5", "Breakout"),
        ("ALE/SpaceInvaders-v5", "SpaceInvaders"),
    ],
)
def test_names_of_one_game_are_one_name(given, game):
    assert Args(env_id=given).env_id == game
    assert find_game(game) == game


def test_settings_of_an_id_are_normalised():
    env = make_env(Args(env_id="ALE/Pong-v5"), 0)().unwrapped
    assert env.ale.getFloat("repeat_action_probability") == 0.0
    assert env._frameskip == 1
    assert env.action_space.n == 6


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Braekout", "did you mean Breakout?"),
        ("space_invaders", "did you mean SpaceInvaders?"),
        ("BrekoutNoFrameskip-v4", "did you mean Breakout?"),
        ("Breakout-v4", "did you mean Breakout?"),
        ("HalfCheetah-v4", "ppo_continuous_action.py"),
        ("Pendulum-v1", "ppo_continuous_action.py"),
        ("CartPole-v1", "ppo_multidiscrete.py"),
        ("zzzzqqqq", "There is no Atari game zzzzqqqq"),
        ("Backgammon", "has no action that does nothing"),
    ],
)
def test_other_environments_are_refused_with_a_hint(env_id, words):
    with pytest.raises(RunError) as error:
        make_envs(Args(env_id=env_id))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("game", ["Backgammon", "VideoCheckers", "Pong", "Skiing"])
def test_games_without_a_noop_are_known(game):
    meanings = gym.make(f"ALE/{game}-v5").unwrapped.get_action_meanings()
    assert (meanings[0] != "NOOP") == (game in ppo_atari.WITHOUT_NOOP)


def test_missing_ale_py_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(RunError, match="pip install ale-py"):
        find_game("Pong")


def test_saved_game_goes_on_bit_for_bit(monkeypatch):
    """Breakout over lost lives, the ends of games and time limits."""
    monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", 120)
    args = Args(env_id="Breakout", num_envs=2, async_envs=False)
    actions = np.random.default_rng(0).integers(0, 4, (330, 2))
    first = make_envs(args)
    first.reset(seed=[1, 2])
    for action in actions[:30]:
        first.step(action)
    states, stack = list(first.call("get_state")), first.stack.copy()
    truncations = 0
    with contextlib.closing(make_envs(replace(args, async_envs=True))) as second:
        second.reset(seed=[3, 4])  # other generators, which must be replaced too
        second.call("set_state", states)
        second.stack = stack
        for action in actions[30:]:
            a, b = first.step(action), second.step(action)
            assert equal(a[:4], b[:4])
            assert str(a[4].get("final_info")) == str(b[4].get("final_info"))
            truncations += a[3].sum()
    assert truncations


@pytest.mark.parametrize("settings", [{"env_backend": "ale"}, {"sticky_actions": 0.25}])
def test_state_that_cannot_be_saved_is_none(settings):
    envs = make_envs(Args(env_id="Pong", num_envs=2, async_envs=False, **settings))
    envs.reset(seed=[1, 2])
    assert envs.call("get_state") == (None, None)
    envs.close()


def test_fast_path_draws_again_when_the_emulator_draws_no_noops():
    game, drawn = AleGame("pong", 0.0), iter([0, 0, 7])
    frame = np.zeros((1, 1, 84, 84), np.uint8)
    seeds = []

    def reset(*, seed):
        seeds.append(seed)
        return frame, {"episode_frame_number": [next(drawn)], "lives": [0]}

    game.emulator.reset = reset
    game.new_game(seed=5)
    assert seeds == [5, None, None]


def test_fast_path_draws_up_to_30_noops():
    game, drawn = AleGame("pong", 0.0), []
    reset = game.emulator.reset

    def recording_reset(*, seed):
        frame, info = reset(seed=seed)
        drawn.append(int(info["episode_frame_number"][0]))
        return frame, info

    game.emulator.reset = recording_reset
    for seed in range(40, 48):  # one of these draws the most
        game.new_game(seed)
    assert max(drawn) == 30
