"""Rows of the table of scripts: what a script shows, and the runs that stand for it."""

from benchmark.evidence.definitions import Script

SCRIPTS = {
    "ppo_minimal.py": Script("all of PPO in about 250 lines", "minimal", "HalfCheetah-v4"),
    "ppo_continuous_action.py": Script(
        "continuous actions, fast: details 1–13 and 23–31", "figure3", "HalfCheetah-v4"
    ),
    "ppo_vector_env.py": Script(
        "simulators that step many environments at once", "vector_env", "HalfCheetah-v4"
    ),
    "ppo_llm.py": Script("PPO and GRPO on a real language model", "llm_sums", "sums"),
    "ppo_kl_penalty.py": Script(
        *("a KL penalty instead of clipping", "kl_vs_clip", "Hopper-v4", "adaptive-0.01")
    ),
    "ppo_atari.py": Script(
        *("Atari games: details 1–22", "games_schedule", "Pong"),
        share=" with step sizes that fall over 10M",
    ),
    "ppo_atari_lstm.py": Script(
        *("Atari with a memory: details 32–36 too", "games", "Pong", "lstm"),
        share=", a fifth of the paper's",
    ),
    "ppo_multidiscrete.py": Script("discrete actions, masks: detail 37", "cartpole", "CartPole-v1"),
    "grpo_minimal.py": Script(
        "all of GRPO in about 200 lines", "grpo_minimal", "sums", score="pass@1"
    ),
    "ppo_rlhf_toy.py": Script("RLHF with PPO", "rlhf", "reviews", score="gold reward"),
    "recipes/grpo_on_reviews.py": Script(
        "GRPO on the same task", "rlhf_grpo_dpo", "reviews", "grpo", score="gold reward"
    ),
    "recipes/dpo_on_reviews.py": Script(
        "DPO on the same task", "rlhf_grpo_dpo", "reviews", "dpo", score="gold reward"
    ),
}
