"""Speeds of trained agents, and the camera that films them."""

import gymnasium as gym
import mujoco
import numpy as np

import ppo_continuous_action as ppo
from benchmark.record import of_walk


def test_speeds_agree_with_what_the_rewards_say_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"num_steps": 256, "total_timesteps": 256, "compile": False, "run_name": "run"}
    ppo.train(ppo.Args(env_id="Hopper-v4", **settings))
    ppo.evaluate(ppo.Args(evaluate="runs/run"))
    found = of_walk(tmp_path / "runs" / "run")
    returns, lengths, speeds = (np.array(found[x]) for x in ("returns", "lengths", "speeds"))
    assert len(speeds) == 10 and len(set(speeds)) == 10
    # A reward is 1, plus the speed, less a thousandth of the squared actions, three of up to 1.
    least = (returns - lengths) / lengths
    assert (least - 1e-3 <= speeds).all() and (speeds <= least + 4e-3).all()


def test_films_follow_the_body_where_there_is_a_camera_that_does():
    for env_id, camera in (("Humanoid-v4", 0), ("InvertedPendulum-v4", -1)):
        env = ppo.make_env(ppo.Args(env_id=env_id, evaluate="runs/run", capture_video=True))
        assert env.unwrapped.mujoco_renderer.camera_id == camera
    followed = gym.make("Humanoid-v4").unwrapped.model.camera("track")
    assert followed.id == 0 and followed.mode == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM
