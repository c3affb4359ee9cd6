"""Speeds of trained agents, and the strip of pictures from a film of one."""

from pathlib import Path

import gymnasium as gym
import moviepy
import mujoco
import numpy as np
import pytest
from PIL import Image

import ppo_continuous_action as ppo
from benchmark.walking import strip, walk


def test_speeds_agree_with_what_the_rewards_say_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"num_steps": 256, "total_timesteps": 256, "compile": False, "run_name": "run"}
    ppo.train(ppo.Args(env_id="Hopper-v4", **settings))
    found = walk(Path(ppo.__file__), Path("runs/run"))
    expected = ppo.evaluate(ppo.Args(evaluate="runs/run"))["mean"]
    returns, lengths, speeds = (np.array(found[x]) for x in ("returns", "lengths", "speeds"))
    assert len(speeds) == 10 and len(set(speeds)) == 10
    np.testing.assert_allclose(returns, expected, atol=1e-3)
    # A reward is 1, plus the speed, less a thousandth of the squared actions, three of up to 1.
    least = (returns - lengths) / lengths
    assert (least - 1e-3 <= speeds).all() and (speeds <= least + 4e-3).all()


def test_strip_shows_eight_moments_in_turn(tmp_path):
    shades = np.repeat(np.arange(0, 250, 10), 2)  # another one every 0.1 s
    frames = [np.full((64, 64, 3), shade, dtype=np.uint8) for shade in shades]
    film = tmp_path / "film.mp4"
    moviepy.ImageSequenceClip(frames, fps=20).write_videofile(str(film), logger=None)
    strip(film, tmp_path / "strip.png", start=0.25)
    picture = np.asarray(Image.open(tmp_path / "strip.png").convert("L"), dtype=float)
    assert picture.shape == (40, 8 * 32)
    assert picture[:, 16::32].mean(0) == pytest.approx(range(20, 100, 10), abs=4)


def test_films_follow_the_body_where_there_is_a_camera_that_does():
    for env_id, camera in (("Humanoid-v4", 0), ("InvertedPendulum-v4", -1)):
        env = ppo.make_env(ppo.Args(env_id=env_id, evaluate="runs/run", capture_video=True))
        assert env.unwrapped.mujoco_renderer.camera_id == camera
    followed = gym.make("Humanoid-v4").unwrapped.model.camera("track")
    assert followed.id == 0 and followed.mode == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
