# ruff: noqa: E501 - a table of code
"""Small tasks for what larger ones do not show: components, masks and memory."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import MULTIDISCRETE, TASKS

# As for Taxi in the docstring of ppo_multidiscrete.py; runs this short are not worth compiling.
EIGHT = "--num-envs 8 --num-steps 128 --num-minibatches 4 --learning-rate 3e-3 --no-compile"
TAXI = f"{EIGHT} --ent-coef 0.01"
JOINT = (TASKS, ('"Points-v0", Points', '"Points-v0", lambda: Joint(Points())'))
MAKE = "def make_env(args: Args, videos: str | None = None) -> gym.Env:\n"
STACKED = "gym.wrappers.FrameStackObservation(env, NUM_FRAMES, padding_type='zero')"
RECALL = (TASKS, (MAKE, f"{MAKE}    env = EpisodicLife(Recall())\n    return {STACKED}\n"))
SMALL_BATCH = "--num-envs 16 --num-steps 32 --learning-rate 1e-3 --torch-threads 1 --bfloat16"
# fmt: off
# Without details of the LSTM. By name: number of the detail; what is in its place; texts.
LSTM_DETAILS = {
    "default-init": ("32", "PyTorch's initialization of linear layers", ("layer_init(nn.Linear(512, 4 * HIDDEN_SIZE), 1.0)", "nn.Linear(512, 4 * HIDDEN_SIZE)"), ("nn.init.orthogonal_(self.lstm_recurrent.weight, 1.0)", "pass")),
    "zero-rollouts": ("33", "zero states at the start of each rollout", ("rollout_state = state", "rollout_state = state = 0 * state")),
    "not-reset": ("34", "states not reset at the ends of episodes", ("output, cell = output * (1 - start), cell * (1 - start)", "pass")),
    "shuffled-steps": ("35", "steps of a minibatch in random order", ("minibatch = Batch(*(x[:, chosen] for x in batch))", "order = torch.randperm(args.num_steps)\n    minibatch = Batch(*(x[:, chosen] if x is batch.state else x[order][:, chosen] for x in batch))")),
    "stored-states": ("36", "stored states in training", ("final_states = []", "final_states, states = [], []"), ("now = slice(t, t + 1)", "states.append(state)\n            now = slice(t, t + 1)"), ("starts[:-1], rollout_state\n", "starts[:-1], torch.stack(states, dim=2)\n"), ("logits, values, _ = self(obs, starts, state)", "shape, state = starts.shape, state.transpose(1, 2).flatten(1, 2)\n        logits, values, _ = self(obs.flatten(0, 1)[None], starts.reshape(1, -1), state)\n        logits, values = logits.view(*shape, -1), values.view(shape)")),
}
# fmt: on
LSTM, FRAMES = "ppo_atari_lstm.py", f"{SMALL_BATCH} --no-compile"
FORGETFUL = {
    name: Variant(LSTM, SMALL_BATCH, label, (number,), replaced=(*RECALL, *replaced))
    for name, (number, label, *replaced) in LSTM_DETAILS.items()
}
COMPONENTS = "four components of 3 to 9 choices"

SUITES = (
    Suite(
        name="multidiscrete",
        reproduces="what independent components are worth where they are independent",
        environments={"Points-v0": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(MULTIDISCRETE, EIGHT, COMPONENTS, replaced=(TASKS,)),
            "joint": Variant(MULTIDISCRETE, EIGHT, "one of 945 choices", ("37",), None, JOINT),
        },
        baseline=("multidiscrete", ""),
        total_timesteps=102_400,
    ),
    Suite(
        name="masks",
        reproduces="what masks of invalid actions are worth, compared with Huang and Ontañón 2020",
        environments={"Taxi-v4": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(MULTIDISCRETE, f"{TAXI} --mask-invalid-actions", "with masks"),
            "unmasked": Variant(MULTIDISCRETE, TAXI, "without masks"),
        },
        baseline=("masks", ""),
        total_timesteps=100_352,
    ),
    Suite(
        name="memory",
        reproduces="that the LSTM remembers, and what each of its details is worth for that",
        environments={"Recall": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(LSTM, SMALL_BATCH, "one frame and an LSTM", replaced=RECALL),
            "frames": Variant("ppo_atari.py", FRAMES, "four frames, no memory", replaced=RECALL),
            **FORGETFUL,
        },
        baseline=("memory", ""),
        total_timesteps=20_480,
    ),
)
