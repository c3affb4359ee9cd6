"""The recipes of language models: each runs, with a random model, and does what it says."""

import numpy as np
import pytest
import tiny_llm

import ppo_llm as ppo
from recipes import llm_game, llm_lora, llm_own_reward

SHORT = {"num_iterations": 1, "num_episodes": 8, "num_minibatches": 2, "eval_episodes": 2}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return {**SHORT, "model": tiny_llm.write(folder), "device": "cpu", "float32": True}


def test_the_game_pays_the_share_of_right_totals_at_its_end():
    env = llm_game.RunningTotal()
    (*beginning, question), _ = env.reset(seed=3)
    assert [x["role"] for x in beginning] == ["system", *["user", "assistant"] * 3]
    total = sum(int(x) for x in question["content"].split() if x.isdigit())
    said = []
    for turn, wrong in enumerate((0, 1, 0)):
        message, reward, terminated, truncated, _ = env.step(f"It is {total + wrong}.")
        said.append(reward)
        assert terminated == (turn == 2) and not truncated
        if turn < 2:
            assert message.startswith("+ ") and message.endswith(" = ?")
            total += int(message.split()[1])
    assert said == [0, 0, pytest.approx(2 / 3)]


def test_the_game_is_played_to_its_end(short):
    args = ppo.Args(**short, env="recipes.llm_game:RunningTotal", max_turns=3)
    (update,) = ppo.train(args)["updates"]
    assert update["charts/turns"] == 3


def test_the_reward_is_for_the_answer_alone():
    rewards = [llm_own_reward.reward(x, "green") for x in ("Green.", "It is green.", "Blue.")]
    assert rewards == [1.0, 0.5, 0.0]


def test_prompts_of_a_file_are_trained_on_with_an_own_reward(short, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        llm_own_reward, "reward", lambda response, answer: given.append(answer) or 1
    )
    result = ppo.train(llm_own_reward.args(tmp_path, **short))
    assert [x["return"] for x in result["episodes"]] == [1] * 8
    *trained, held_out = llm_own_reward.COLORS.values()
    assert set(given[:2]) == {held_out} and set(given[2:-2]) <= set(trained)


def test_adapters_are_trained_and_their_kl_is_logged(short):
    result = ppo.train(llm_lora.args(**short, update_epochs=1))
    assert result["args"].lora_rank == 16
    assert (result["run_dir"] / "adapter/adapter_model.safetensors").exists()
    assert np.isfinite(result["updates"][0]["charts/kl"])
