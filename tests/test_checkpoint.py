"""Checkpoints: a killed run continues bit for bit, bad files are refused, bad disks survived."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import same_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous_action as ppo
from ppo_continuous_action import Resumable, RunError, train

TIMING = {"charts/SPS", "charts/SPS_rollout", "charts/SPS_update"}
ENVS = ["HalfCheetah-v4", "Pendulum-v1", "Hopper-v4", "Reacher-v4", "MountainCarContinuous-v0"]


class Killed(Exception):
    """Stands for kill -9 at the end of an iteration, before anything is saved."""


@pytest.fixture
def kill_after(monkeypatch):
    """End the run by an exception once an iteration has been logged."""
    real = ppo.RunLog.iteration

    def arm(iteration):
        def dying(self, *args):
            real(self, *args)
            if len(self.updates) == iteration:
                raise Killed

        monkeypatch.setattr(ppo.RunLog, "iteration", dying)

    return arm


def curves(folder):
    """Every TensorBoard curve of a run, without timings."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"]) - TIMING
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def resume(args, path=None):
    """Continue in this process; TensorBoard orders its files by the second they were made in."""
    time.sleep(1.01 - time.time() % 1)
    return train(dataclasses.replace(args, resume=str(path or args.run_dir)))


def without_timing(updates):
    return [{k: v for k, v in x.items() if k not in TIMING} for x in updates]


def assert_same_run(a, b):
    """Two results of `train` are bitwise the same, in memory and in what they wrote."""
    assert same_weights(a["agent"], b["agent"])
    assert a["episodes"] == b["episodes"]
    np.testing.assert_equal(without_timing(a["updates"]), without_timing(b["updates"]))
    np.testing.assert_equal(curves(a["args"].run_dir), curves(b["args"].run_dir))
    assert (a["args"].run_dir / "episodes.csv").exists() is bool(a["episodes"])


# --- Exactness, within one process ---


@pytest.mark.parametrize("env_id", ENVS)
def test_killed_and_resumed_run_equals_the_uninterrupted_one(tiny, kill_after, env_id, monkeypatch):
    settings = {
        "env_id": env_id,
        "num_steps": 64,
        "total_timesteps": 1024,
        "checkpoint_interval": 3,
    }
    whole = train(tiny(**settings))
    kill_after(5)  # two iterations after the checkpoint: their logs must be made again
    args = tiny(**settings)
    with pytest.raises(Killed):
        train(args)
    assert len((args.run_dir / "updates.csv").read_text().splitlines()) == 6
    kill_after(7)
    with pytest.raises(Killed):
        resume(args)
    kill_after(0)
    resumed = resume(args, args.run_dir / "checkpoint.pt")
    assert len(resumed["updates"]) == 8
    assert_same_run(whole, resumed)


def test_asynchronous_environments_resume_exactly_too(tiny, kill_after):
    settings = {"env_id": "Pendulum-v1", "checkpoint_interval": 1, "async_envs": True}
    whole = train(tiny(**settings))
    kill_after(2)
    args = tiny(**settings)
    with pytest.raises(Killed):
        train(args)
    kill_after(0)
    assert_same_run(whole, resume(args))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_environment_process_ends_the_run(tiny, victim):
    """Instead of waiting for its answer for ever."""
    args = tiny(env_id="Pendulum-v1", num_envs=3, async_envs=True)
    with pytest.raises((EOFError, ConnectionError)), ppo.closing_envs(ppo.make_envs(args)) as envs:
        envs.reset(seed=[1, 2, 3])
        os.kill(envs.processes[victim].pid, signal.SIGKILL)
        envs.processes[victim].join()
        envs.step(np.zeros((3, 1), np.float32))
    for process in envs.processes:
        process.join(10)
        assert not process.is_alive()


def test_files_of_a_gpu_are_read_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    content = {"format": ppo.FORMAT, "script": ppo.SCRIPT, "weights": torch.ones(2)}
    assert ppo.save_file(tmp_path / "file.pt", content)
    assert b"cuda:0" in (tmp_path / "file.pt").read_bytes()
    assert ppo.load_file(tmp_path / "file.pt", "weights")["weights"].tolist() == [1, 1]


def test_state_of_many_processes_takes_no_open_files(tiny):
    """Tensors sent from process to process take one each, and 8 HalfCheetahs hold hundreds."""
    args = tiny(env_id="HalfCheetah-v4", num_envs=2, async_envs=True)
    with contextlib.closing(ppo.make_envs(args)) as envs:
        envs.reset(seed=[1, 2])
        before = len(os.listdir("/proc/self/fd"))
        states = envs.call("get_state")
        assert len(os.listdir("/proc/self/fd")) == before
        envs.call("set_state", states)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("env_id", ["Humanoid-v4", "Ant-v4", "HalfCheetah-v5", "Pendulum-v1"])
def test_environment_state_is_complete(env_id):
    """Also rewards that read derived quantities, and the resets after the restored episode."""

    def make():
        env = Resumable(ppo.gym.make(env_id, max_episode_steps=30, disable_env_checker=True), 0)
        env.reset(seed=1)
        return env

    def play(env, actions):
        trace = []
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            trace.append((obs.tobytes(), reward, terminated, truncated))
            if terminated or truncated:
                trace.append(env.reset()[0].tobytes())
        return trace

    first = make()
    first.action_space.seed(0)
    actions = [first.action_space.sample() for _ in range(60)]
    play(first, actions[:11])
    state = first.get_state()
    expected = play(first, actions[11:])
    second = make()
    play(second, actions[:3])
    second.set_state([state])
    assert play(second, actions[11:]) == expected


class Collections(ppo.gym.Env):
    """Keeps its state in a list, a dictionary and a tuple of numpy numbers."""

    observation_space = ppo.gym.spaces.Box(-9, 9, (2,), np.float64)
    action_space = ppo.gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.clock = [float(self.np_random.normal())], {"t": 0}
        self.pair = (np.float64(0.1), np.array([0.2]))
        return self.obs(), {}

    def obs(self):
        return np.array([self.position[0], self.pair[0]])

    def step(self, action):
        self.clock["t"] += 1
        self.position[0] += 0.1 * float(action[0])
        self.pair = (self.pair[0] * 0.9 + self.position[0], self.pair[1] * 2)
        return self.obs(), -abs(self.position[0]), False, self.clock["t"] == 40, {}


def test_state_in_lists_dictionaries_and_tuples_resumes_exactly(tiny, kill_after, monkeypatch):
    spec = ppo.gym.envs.registration.EnvSpec("FakeCollections-v0", Collections)
    monkeypatch.setitem(ppo.gym.registry, "FakeCollections-v0", spec)
    settings = {"env_id": "FakeCollections-v0", "checkpoint_interval": 1}
    whole = train(tiny(**settings))
    args = tiny(**settings)
    kill_after(2)
    with pytest.raises(Killed):
        train(args)
    kill_after(0)
    assert_same_run(whole, resume(args))


@pytest.mark.parametrize(
    "hidden",
    [np.random.RandomState(0), np.array([None]), ppo.gym.make("CartPole-v1").unwrapped, Killed()],
    ids=lambda x: type(x).__name__,
)
def test_state_that_cannot_be_saved_whole_is_none(hidden):
    env = Collections()
    env.reset(seed=1)
    # The same in a new environment:
    env.dtype, env.kind, env.map = np.dtype("float32"), np.float32, np.array(["SFG"], "S")
    assert Resumable(env, 0).get_state() is not None
    env.hidden = hidden
    assert Resumable(env, 0).get_state() is None


class Drawer:
    """Like the surface that a picture is drawn on."""


Drawer.__module__ = "pygame.surface"


@pytest.mark.parametrize(
    ("attributes", "resumable"),
    [
        (lambda board: {"board": board, "row": board[0]}, False),
        (lambda board: {"board": board, "rows": [board[1:]]}, False),
        (lambda board: {"board": board, "again": {"x": (board,)}}, False),
        (lambda board: {"places": [[1]], "again": (x := [2]), "more": {"x": x}}, False),
        (lambda board: {"generators": [np.random.default_rng(0)]}, False),
        (lambda board: {"left": board[:, :0], "right": board, "none": (), "other": ()}, True),
        (lambda board: {"board": board[0], "rest": board[1], "text": "a", "again": "a"}, True),
        (lambda board: {"board": board, "_ezpickle_kwargs": {"board": board}}, True),
        (lambda board: {"surface": Drawer()}, True),
    ],
)
def test_what_two_names_share_is_not_taken_apart(attributes, resumable):
    env = Collections()
    env.reset(seed=1)
    vars(env).update(attributes(np.zeros((3, 2))))
    assert (Resumable(env, 0).get_state() is not None) == resumable


def test_last_observation_outlives_the_reset_and_information_is_dropped():
    class Reusing(Collections):
        def reset(self, *, seed=None, options=None):
            obs, _ = super().reset(seed=seed)
            self.buffer = obs
            return self.buffer, {"seed": 2**100}

        def step(self, action):
            self.buffer[:] = 7.0
            return self.buffer, 0.0, False, True, {}

        def obs(self):
            obs = getattr(self, "buffer", np.zeros(2))
            obs[:] = 0.0
            return obs

    for vector in (ppo.SyncVectorEnv, ppo.AsyncVectorEnv):
        envs = vector(
            [lambda i=i: Resumable(Reusing(), i) for i in range(2)],
            autoreset_mode=ppo.AutoresetMode.SAME_STEP,
        )
        envs.reset(seed=1)
        *_, infos = envs.step(np.zeros((2, 1), np.float32))
        assert np.stack(infos["final_obs"]).tolist() == [[7.0, 7.0]] * 2
        envs.close()


def test_episodes_start_anew_in_all_processes_or_in_none(tiny):
    envs = ppo.make_envs(tiny(num_envs=1))
    envs.reset(seed=1)
    process = ppo.ProcessState(envs, np.random.default_rng(0), {}, {})
    own = process.capture()
    assert process.restore([own])
    assert process.restore([own, own])
    assert not process.restore([own, {**own, "envs": [None]}])  # another process's


def test_videos_neither_prevent_nor_overwrite(tmp_path):
    """A restored run goes on with the number of the next video; the begun one is dropped."""

    class Drawn(Collections):
        render_mode, metadata = "rgb_array", {"render_fps": 30}

        def render(self):
            return np.zeros((16, 16, 3), np.uint8)

    def make(folder):
        return Resumable(
            ppo.gym.wrappers.RecordVideo(Drawn(), str(folder), episode_trigger=lambda x: True), 0
        )

    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    for seed in (1, 2, 3):
        first.reset(seed=seed)
    second.reset(seed=1)
    second.set_state([first.get_state()])
    a, b = first.step(np.zeros(1)), second.step(np.zeros(1))
    assert (a[0] == b[0]).all()
    second.reset()
    second.step(np.zeros(1))
    second.close()
    assert [x.name for x in (tmp_path / "b").glob("*.mp4")] == ["rl-video-episode-3.mp4"]
    first.close()


class ForeignState(ppo.gym.Wrapper):
    """Hides state in an object that a checkpoint cannot hold."""

    def __init__(self, env):
        super().__init__(env)
        self.simulator = Killed()


def test_the_state_of_a_flattened_environment_can_be_saved(tiny):
    """The wrapper holds a function, which is no state."""
    env = ppo.make_env(tiny(env_id="FakeShapes-v0"), 0)()
    env.reset(seed=1)
    assert env.get_state() is not None


def test_unknown_simulators_start_new_episodes_and_say_so(tiny, monkeypatch, capsys, kill_after):
    real = ppo.gym.make
    monkeypatch.setattr(ppo.gym, "make", lambda *a, **k: ForeignState(real(*a, **k)))
    args = tiny(checkpoint_interval=1)
    kill_after(2)
    with pytest.raises(Killed):
        train(args)
    kill_after(0)
    result = resume(args)
    assert "episodes start anew" in capsys.readouterr().out
    assert len(result["updates"]) == 3
    assert all(x["length"] == 5 and x["return"] == 5.0 for x in result["episodes"])


@pytest.mark.parametrize("torn", ["3", "36,5.", "40,5.0,", "20,1.0,-", "36,5.36,5.0,5\n", "\x00\n"])
def test_a_log_torn_by_the_kill_is_mended(tiny, kill_after, torn):
    whole = train(tiny(checkpoint_interval=1))
    args = tiny(checkpoint_interval=1)
    kill_after(2)  # the last checkpoint is that of step 32
    with pytest.raises(Killed):
        train(args)
    with (args.run_dir / "episodes.csv").open("a") as file:
        file.write(torn)
    kill_after(0)
    assert_same_run(whole, resume(args))
    rows = (args.run_dir / "episodes.csv").read_text()
    assert rows == (whole["args"].run_dir / "episodes.csv").read_text()


# --- What may change on resuming ---


def test_a_finished_run_can_be_extended(tiny):
    args = tiny(anneal_lr=False)
    train(args)
    longer = resume(dataclasses.replace(args, total_timesteps=192))
    whole = train(tiny(anneal_lr=False, total_timesteps=192))
    assert_same_run(whole, longer)
    assert json.loads((args.run_dir / "args.json").read_text())["total_timesteps"] == 192


def test_a_run_whose_logs_cannot_be_written_is_not_resumed(tiny):
    args = tiny()
    train(args)
    (args.run_dir / "updates.tmp").mkdir()  # where the log is to be rewritten
    with pytest.raises(RunError, match=f"Cannot write to {args.run_dir}"):
        resume(args)


@pytest.mark.parametrize(
    "change", [{"learning_rate": 0.1}, {"seed": 5}, {"num_steps": 32}, {"env_id": "Pendulum-v1"}]
)
def test_settings_that_would_alter_the_run_cannot_change(tiny, change):
    args = tiny()
    train(args)
    flag = "--" + next(iter(change)).replace("_", "-")
    with pytest.raises(RunError, match=f"{flag} .* cannot change"):
        train(dataclasses.replace(args, resume=str(args.run_dir), **change))


def test_command_line_takes_the_settings_from_the_checkpoint(tiny, monkeypatch, capsys):
    args = tiny(learning_rate=0.01, total_timesteps=64)
    train(args)

    def main(*flags):
        monkeypatch.setattr(sys, "argv", ["ppo", "--resume", str(args.run_dir), *flags])
        ppo.main()

    main("--total-timesteps", "128")
    assert len((args.run_dir / "updates.csv").read_text().splitlines()) == 1 + 4
    # Also a flag that names the default is a change, if the run had another value.
    with pytest.raises(SystemExit) as exit:
        main("--learning-rate", "3e-4")
    assert exit.value.code == 2 and "--learning-rate 0.01" in capsys.readouterr().err


def test_resume_auto_starts_then_continues_then_is_done(tiny, kill_after, capsys):
    args = dataclasses.replace(tiny(run_name="auto"), resume="auto", checkpoint_interval=1)
    kill_after(2)
    with pytest.raises(Killed):
        train(args)
    kill_after(0)
    result = train(args)
    assert "from step 32" in capsys.readouterr().out and len(result["updates"]) == 3
    assert same_weights(result["agent"], train(args)["agent"])


def test_a_run_killed_before_its_first_checkpoint_starts_over_by_itself(tiny, kill_after):
    whole = train(tiny())
    args = dataclasses.replace(tiny(), resume="auto")
    kill_after(2)
    with pytest.raises(Killed):
        train(args)
    kill_after(0)
    assert_same_run(whole, train(args))


@pytest.mark.parametrize("resume", [None, "auto"])
def test_other_files_in_the_run_folder_are_left_alone(tiny, resume):
    args = dataclasses.replace(tiny(), resume=resume)
    args.run_dir.mkdir()
    (args.run_dir / "mine.csv").write_text("a,b\n")
    train(args)
    assert (args.run_dir / "mine.csv").read_text() == "a,b\n"
    other = dataclasses.replace(tiny(), resume=resume)
    other.run_dir.mkdir()
    (other.run_dir / "episodes.csv").write_text("a,b\n")
    with pytest.raises(RunError, match="holds a run: use another --run-name"):
        train(other)
    assert (other.run_dir / "episodes.csv").read_text() == "a,b\n"
    with pytest.raises(RunError, match=r"holds a run: add --resume .* or another --run-name"):
        train(dataclasses.replace(args, resume=None))


def test_resumed_runs_check_the_flags_that_may_change(tiny):
    args = tiny()
    train(args)
    for change, words in (
        ({"checkpoint_interval": 0}, "--checkpoint-interval must be positive"),
        ({"total_timesteps": -5}, "--total-timesteps must be positive"),
        ({"total_timesteps": 64}, "at step 96 already"),
    ):
        with pytest.raises(RunError, match=words):
            train(dataclasses.replace(args, resume=str(args.run_dir), **change))


def test_saving_works_without_hard_links(tiny, monkeypatch):
    def no_links(*paths):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    args = tiny(checkpoint_interval=1)
    train(args)
    for name, iteration in (("checkpoint.pt", 3), ("checkpoint.previous.pt", 2)):
        assert ppo.load_file(args.run_dir / name, "processes")["iteration"] == iteration


def test_resume_auto_falls_back_to_the_previous_checkpoint(tiny):
    args = dataclasses.replace(tiny(checkpoint_interval=1), resume="auto")
    whole = train(args)
    path = args.run_dir / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    time.sleep(1.01 - time.time() % 1)  # as in `resume`
    assert_same_run(whole, train(args))


# --- Files ---


def test_checkpoint_loads_with_weights_only_and_keeps_its_predecessor(tiny):
    args = tiny(checkpoint_interval=1)
    train(args)
    for name, iteration in (("checkpoint.pt", 3), ("checkpoint.previous.pt", 2)):
        content = torch.load(args.run_dir / name, weights_only=True)
        assert content["iteration"] == iteration and content["format"] == ppo.FORMAT
    assert not list(args.run_dir.glob("*.tmp"))


class Bomb:
    """A pickle that would create a file if it were ever loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def signed(content):
    """Arbitrary content in a file with a valid digest."""
    path = Path(os.environ["PYTEST_TMP"]) / "signed.pt"
    assert ppo.save_file(path, content)
    return path.read_bytes()


def malformed(good, tmp_path):
    """Name -> bytes of more than 30 files that must be refused."""
    rng = random.Random(0)
    content = torch.load(io.BytesIO(good), weights_only=True)
    cases = {f"cut at {n}": good[:n] for n in [0, 1, 65, 66, *rng.sample(range(len(good)), 8)]}
    for position in [*rng.sample(range(len(good)), 14), len(good) - 1, len(good) - 65]:
        flipped = bytearray(good)
        flipped[position] ^= 1 << rng.randrange(8)
        cases[f"flipped at {position}"] = bytes(flipped)
    cases["trailing byte"] = good + b"\0"
    bomb = pickle.dumps({"format": 1, "x": Bomb(tmp_path / "executed")})
    cases["pickle with code"] = bomb
    plain = io.BytesIO()
    torch.save({**content, "args": Bomb(tmp_path / "executed")}, plain)
    cases["archive with code"] = plain.getvalue()
    cases["signed code"] = signed({**content, "args": Bomb(tmp_path / "executed")})
    cases["another script's"] = signed({**content, "script": "ppo_atari"})
    cases["newer format"] = signed({**content, "format": 999})
    cases["not a dictionary"] = signed([1, 2, 3])
    cases["without format"] = signed({"agent": {}})
    cases["without a run"] = signed({k: v for k, v in content.items() if k != "processes"})
    cases["unknown settings"] = signed({**content, "args": {**content["args"], "novel": 1}})
    cases["other processes"] = signed({**content, "processes": content["processes"] * 2})
    cases["text"] = b"hello\n" * 100
    return cases


def test_malformed_checkpoints_are_refused_with_a_sentence_and_not_executed(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    args = tiny(env_id="Pendulum-v1")
    train(args)
    path = args.run_dir / "checkpoint.pt"
    good = path.read_bytes()
    cases = malformed(good, tmp_path)
    assert len(cases) > 30
    before = {x: x.read_bytes() for x in args.run_dir.iterdir() if x != path}
    for name, data in cases.items():
        path.write_bytes(data)
        try:
            train(dataclasses.replace(args, resume=str(args.run_dir)))
        except RunError as error:
            refused = error
        else:
            pytest.fail(f"accepted: {name}")
        message = str(refused)
        assert str(path) in message and "\n" not in message and message.endswith("."), (
            name,
            message,
        )
        assert not (tmp_path / "executed").exists(), name
    assert before == {x: x.read_bytes() for x in args.run_dir.iterdir() if x != path}
    path.write_bytes(good)
    resume(args)


def test_refusal_names_the_older_good_checkpoint(tiny):
    args = tiny(checkpoint_interval=1)
    train(args)
    path = args.run_dir / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"damaged.*older good one is .*checkpoint\.previous\.pt"):
        resume(args)
    older = args.run_dir / "checkpoint.previous.pt"
    assert len(resume(args, older)["updates"]) == 3


# --- Disks that fail ---


def test_a_full_disk_costs_a_warning_not_the_run_nor_the_last_checkpoint(tiny, monkeypatch, capsys):
    args = tiny(checkpoint_interval=1)
    real, saves = os.fsync, []

    def full_after_the_first(descriptor):
        saves.append(descriptor)
        if len(saves) > 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_after_the_first)
    with pytest.raises(RunError, match=r"training is done, but .* takes no model"):
        train(args)
    assert len(saves) == 4  # three checkpoints and the model: the training went to its end
    assert "No space left on device" in capsys.readouterr().out
    monkeypatch.undo()
    assert ppo.load_file(args.run_dir / "checkpoint.pt", "processes")["iteration"] == 1
    whole = train(tiny())
    assert_same_run(whole, resume(args))


def test_a_removed_run_folder_does_not_end_the_run(tiny, monkeypatch, capsys):
    import shutil

    args = tiny(checkpoint_interval=1, total_timesteps=160)
    real = ppo.RunLog.iteration

    def removing(self, *arguments):
        real(self, *arguments)
        if len(self.updates) == 2:
            shutil.rmtree(args.run_dir, ignore_errors=True)

    monkeypatch.setattr(ppo.RunLog, "iteration", removing)
    assert len(train(args)["updates"]) == 5
    assert ppo.load_file(args.run_dir / "model.pt", "agent")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk_does_not_end_the_run(tiny, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk])
    if mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        args = tiny(output_dir=str(disk), checkpoint_interval=1, total_timesteps=640)
        with pytest.raises(RunError, match="training is done"):
            train(args)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# --- Signals, in real processes ---

RUN = "--num-steps 128 --num-minibatches 4 --update-epochs 4 --checkpoint-interval 2"


def start(folder, env_id, *flags):
    command = [sys.executable, ppo.__file__, *RUN.split(), "--env-id", env_id, *flags]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out


def wait_for(path, process):
    """Until the file exists; a run that ends before is a failure."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def result_of(folder):
    """What a finished run left: weights, episode log, curves."""
    content = torch.load(folder / "model.pt", weights_only=True)
    return content["agent"], (folder / "episodes.csv").read_text(), curves(folder)


def assert_same_result(a, b):
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert a[1] == b[1]
    np.testing.assert_equal(a[2], b[2])


@pytest.mark.parametrize(
    ("env_id", "steps"),
    [("Pendulum-v1", 12_800), pytest.param("HalfCheetah-v4", 25_600, marks=pytest.mark.slow)],
)
def test_run_killed_at_five_random_points_equals_the_uninterrupted_one(tmp_path, env_id, steps):
    size = ["--total-timesteps", str(steps)]
    finish(start(tmp_path, env_id, *size, "--run-name", "whole"))
    rng = random.Random(0)
    folder = tmp_path / "runs/cut"
    kills, last_iteration = 0, 0
    while kills < 5:
        process = start(tmp_path, env_id, *size, "--run-name", "cut", "--resume", "auto")
        target = last_iteration + 2 + rng.randrange(12)
        while process.poll() is None:  # a point in the run, not in the start-up
            updates = folder / "updates.csv"
            done = len(updates.read_text().splitlines()) - 1 if updates.exists() else 0
            if done >= target and (folder / "checkpoint.pt").exists():
                break
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        print(f"killed after iteration {done}", end=", ")
        last_iteration = torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"]
        print(f"resumes after {last_iteration}")
    finish(start(tmp_path, env_id, "--resume", "runs/cut"))
    assert_same_result(result_of(tmp_path / "runs/whole"), result_of(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_says_how_to_resume_and_exits_with_its_code(tmp_path, number):
    size = ["--total-timesteps", "6400", "--checkpoint-interval", "1000"]
    finish(start(tmp_path, "Pendulum-v1", *size, "--run-name", "whole"))
    process = start(tmp_path, "Pendulum-v1", *size, "--run-name", "cut")
    wait_for(tmp_path / "runs/cut/updates.csv", process)
    process.send_signal(number)
    out = finish(process, 128 + number)
    assert f"Stopped by {number.name}; continue with --resume runs/cut" in out.splitlines()[-1]
    (command,) = re.findall(r"--resume runs/cut", out.splitlines()[-1])
    finish(start(tmp_path, "Pendulum-v1", *command.split()))
    assert_same_result(result_of(tmp_path / "runs/whole"), result_of(tmp_path / "runs/cut"))


def test_second_signal_ends_at_once(tmp_path):
    slow = ["--total-timesteps", "1000000", "--num-steps", "100000", "--num-minibatches", "1"]
    process = start(tmp_path, "Pendulum-v1", *slow, "--run-name", "cut")
    wait_for(tmp_path / "runs/cut/args.json", process)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGTERM
