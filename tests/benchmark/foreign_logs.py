"""Logs as other implementations write them."""

from torch.utils.tensorboard import SummaryWriter

PENDULUM = "InvertedPendulum-v5"


def write_settings(writer, settings):
    """As CleanRL does."""
    rows = "\n".join(f"|{x}|{y}|" for x, y in settings.items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")


def write_cleanrl(folder, seed=1, metrics=(), environment=PENDULUM, gain=1.0, **settings):
    """A log as CleanRL's PPO writes it."""
    writer = SummaryWriter(str(folder / f"{environment}__ppo__{seed}__1700000000"))
    write_settings(writer, {"env_id": environment, "seed": seed} | settings)
    for i in range(1, 41):
        for k in range(5):
            writer.add_scalar("charts/episodic_return", gain * (i + k), 2048 * i - 1600 + 400 * k)
        values = {"approx_kl": 0.01, "clipfrac": 0.15, "explained_variance": 0.9, "entropy": 1.0}
        for name, value in (values | dict(metrics)).items():
            writer.add_scalar(name if "/" in name else f"losses/{name}", value, 2048 * i)
    writer.close()


def write_values(folder, name, values):
    """A log of one metric."""
    with SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(values):
            writer.add_scalar(name, value, step)


def write_plain(folder, level=100.0, last=20_000, step=1000, returns=True, metrics=True, **about):
    """A log that says no more of its environment and settings than it is told to."""
    with SummaryWriter(str(folder)) as writer:
        if about:
            write_settings(writer, about)
        for i in range(step, last + 1, step):
            if returns:
                writer.add_scalar("charts/episodic_return", level, i - 7 * step // 1000)
            if metrics:
                writer.add_scalar("losses/approx_kl", level / 1e5, i)
