"""The Atari environments: the same as on the raw emulator, bit for bit.

That comparison has all of the details 14-20; fake games add what happens seldom.
"""

from collections.abc import Iterator

import ale_py
import cv2
import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with
from ale_py import roms
from helpers import record

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
        self.ale = fake_envs.emulator(lambda: self.lives_left)

    def frame(self):
        return np.full((210, 160, 3), (50 * self.game + self.t) % 256, np.uint8)

    def render(self):
        self.calls.append("render")
        return self.frame()

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


def test_noop_reset_takes_1_to_30_frames():
    game, counts = FakeGame(ALIVE), set()
    game.np_random = np.random.default_rng(0)
    for _ in range(300):
        game.calls.clear()
        ppo.NoopReset(game).reset()
        counts.add(game.calls.count(0))
    assert counts == {*range(1, 31)}


def test_noop_reset_starts_over_when_the_game_ends_meanwhile():
    game = FakeGame(ALIVE, OVER, ALIVE, ALIVE, ALIVE)
    game.np_random = np.random.default_rng(3)
    frame, _ = ppo.NoopReset(game).reset()
    assert game.calls.count("reset") >= 2
    assert np.array_equal(frame, game.frame())


def test_max_and_skip_renders_only_the_last_two_frames_and_stops_when_the_game_ends():
    env = begun(ppo.MaxAndSkip, *[ALIVE] * 4, (1.0, 3, False), (1.0, 0, True))
    env.step(2)
    frame, reward, terminated, _, _ = env.step(1)
    assert terminated and reward == 2
    assert env.unwrapped.calls == ["reset", 2, 2, 2, "render", 2, "render", 1, 1, "render"]
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


def test_clip_reward_is_the_sign():
    env = ppo.ClipReward(FakeGame())
    assert [env.reward(r) for r in (-5, -0.1, 0, 0.1, 7)] == [-1, -1, 0, 1, 1]


@scripts("atari")
@pytest.mark.parametrize("press", range(3))  # the no-op, FIRE, action 2
def test_a_game_that_ends_under_a_press_that_begins_a_life_is_noted(
    script, press, monkeypatch, capsys
):
    """Once, also by a resumed run, which plays the press again."""
    presses = [(1.0, 2, False)] * press + [(5.0, 0, True)]
    settings = {"num_envs": 1, "num_steps": 2, "num_minibatches": 1, "update_epochs": 1}
    settings["learning_rate"] = 0.0

    def train(game, resume=None, **others):
        env = ppo.WarpFrame(ppo.FireReset(ppo.EpisodicLife(game)))
        env = gym.wrappers.FrameStackObservation(env, ppo.NUM_FRAMES, padding_type="zero")
        monkeypatch.setattr(ppo, "make_env", lambda args: env)
        return ppo.train(script.args(**settings, **others), resume=resume)["episodes"]

    first, second, third = (FakeGame(ALIVE, ALIVE, LOST, *presses, *[ALIVE] * 5) for _ in range(3))
    whole = train(first, total_timesteps=24)
    assert whole[0] == {"global_step": 1, "return": press + 5.0, "length": 4 + press}
    assert len(whole) == first.game - 2 > 1  # one runs, one was loaded
    train(second, total_timesteps=2, run_name="run")
    third.game = 1  # as if it had been loaded, like the others
    resumed = train(third, total_timesteps=24, resume="runs/run")
    assert "could not be replayed" not in capsys.readouterr().out and resumed == whole


# --- The whole against the raw emulator ---


class RawGame:
    """ppo2's rules once more, as plain statements on ALEInterface: the independent replay."""

    def __init__(self, game, seeds, step_limit):
        self.seeds, self.step_limit, self.episodes = seeds, step_limit, []
        self.seed = next(seeds)
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
                self.seed = next(self.seeds)
            if terminated or truncated:
                self.begin(over)
            yield self.stack, final, [np.sign(points), terminated, truncated]


def seeds(steps: int, num_actions: int) -> Iterator[int]:
    """Those of the games in the first rollout, whose noise is drawn before them."""
    yield np.random.default_rng([1, 0, 0]).integers(2**31).item()
    rng = np.random.default_rng([1, 1, 0])
    rng.gumbel(size=(steps, 1, num_actions))
    while True:
        yield rng.integers(2**31).item()


@scripts("atari")
@pytest.mark.parametrize(
    ("game", "steps"),
    [("Breakout", 250), *(pytest.param(game, 3000, marks=pytest.mark.slow) for game in GAMES)],
)
def test_a_rollout_equals_a_raw_emulator_bit_for_bit(script, game, steps, monkeypatch):
    limit = STEP_LIMIT.get(game, ppo.MAX_GAME_STEPS)
    monkeypatch.setattr(ppo, "MAX_GAME_STEPS", limit)
    buttons = ppo.make_env(ppo.Args(env_id=game)).action_space.n.item()
    actions = np.random.default_rng(1).integers(0, buttons, steps).tolist()
    given = iter(actions)
    monkeypatch.setattr(ppo, "draw", lambda *_: torch.tensor([next(given)]))
    seen = record(monkeypatch, ppo.Agent, "forward")
    learned = record(monkeypatch, ppo, "gae")
    settings = {"num_steps": steps, "total_timesteps": steps, "num_minibatches": 10}
    settings |= {"num_envs": 1, "update_epochs": 1}
    result = ppo.train(script.args(env_id=game, **settings))

    raw = RawGame(game, seeds(steps, buttons), limit)
    raw.begin(new_game=True)
    stacks, finals, outcomes = [raw.stack], [], []
    for stack, final, outcome in raw.play(actions):
        stacks.append(stack)
        outcomes.append(outcome)
        finals += [final] * outcome[2]
    assert np.array_equal([x[0] for _, x, _ in seen[: steps + 1]], stacks)
    ((rewards, _, next_values, done, *_),) = learned
    assert not finals or np.array_equal(seen[steps + 1][1], finals)
    points, terminated, truncated = map(np.array, zip(*outcomes))
    assert np.array_equal(rewards[:, 0], points)
    assert np.array_equal(done[:, 0], terminated | truncated)
    assert not next_values[terminated].any() and next_values[~terminated].all()
    assert [(x["return"], x["length"]) for x in result["episodes"]] == raw.episodes != []
    assert bool(finals) == (game in STEP_LIMIT)


# --- Games that go on after a restart ---


def new_game(args):
    """A game whose observations are its own."""
    return ppo.Game(ppo.make_env(args), np.zeros((4, 84, 84), dtype=np.uint8))


def played(game, rng, actions):
    """Observation, reward, ends and new scores of each step, taken as `train` takes it."""
    for action in actions:
        reward, failed, cut_off, is_over = game.step(action)
        scores = []
        if failed or cut_off:
            scores = game.begin_next(rng.integers(2**31).item() if is_over else None)
        yield game.obs.copy(), reward, failed, cut_off, scores


@pytest.mark.parametrize(
    ("game", "sticky"), [("Breakout", 0.25), pytest.param("Seaquest", 0.0, marks=pytest.mark.slow)]
)
def test_a_game_replayed_while_another_is_running_goes_on_bit_for_bit_through_lost_lives(
    game, sticky, monkeypatch
):
    monkeypatch.setattr(ppo, "MAX_GAME_STEPS", 150)
    args = ppo.Args(env_id=game, sticky_actions=sticky)
    one, other = new_game(args), new_game(args)
    assert one.ale.getFloat("repeat_action_probability") == sticky
    rng, actions = np.random.default_rng(1), np.random.default_rng(2)
    buttons = one.env.action_space.n
    one.load(rng.integers(2**31).item())
    lost, scores = 0, []
    while not (scores and lost):  # in a later game and a later life
        ((_, _, failed, _, new),) = played(one, rng, actions.integers(buttons, size=1))
        lost, scores = (lost + failed) * (len(one.actions) > 0), scores + new
    other.load(5)
    other.step(1)
    other.replay(recorded := one.record(None))
    assert np.array_equal(other.obs, one.obs)
    for a, b in zip(recorded, other.record(None), strict=True):
        assert np.array_equal(a, b)
    before, more = rng.bit_generator.state, actions.integers(buttons, size=150)
    first = [*played(one, rng, more)]
    rng.bit_generator.state = before
    second = [*played(other, rng, more)]
    for x, y in zip(first, second, strict=True):
        assert np.array_equal(x[0], y[0]) and x[1:] == y[1:]
    assert one.env.get_wrapper_attr("score") == other.env.get_wrapper_attr("score")


@scripts_with("games")
def test_names_of_one_game_are_one_name(script):
    for name in ("Pong", "PongNoFrameskip-v4", "ALE/Pong-v5", "Pong-v5"):
        assert script.module.Args(env_id=name).env_id == "Pong"


def test_other_games_are_refused_with_a_hint():
    for name, hint in (("Breakuot", "Did you mean: `Breakout`"), ("VideoCheckers", "no no-op")):
        with pytest.raises((ppo.UsageError, gym.error.Error), match=hint):
            ppo.make_env(ppo.Args(env_id=name))
