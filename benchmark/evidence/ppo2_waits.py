"""How long ppo2's seeds wait for their first reward in Enduro, from OpenAI's two published curves.

    python -m benchmark.evidence.ppo2_waits

The curves are averages over steps before and after (`symmetric_ema` with 100 points in baselines'
plot_util.py: a two-sided exponential whose scale is the distance of two points), so that they leave
0 before anything has been earned. While nothing has been, they grow by known factors.
"""

import numpy as np
import pandas as pd

from benchmark.lab.provenance import ROOT

SEEDS = 6
DAY = 3326  # steps of an episode that earns nothing


def smoothed(returns: np.ndarray, ends: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Returns of episodes that end after `ends` steps, averaged as OpenAI's curves are. (G,)"""
    weights = np.exp(-np.abs(grid[:, None] - ends) / (grid[1] - grid[0]))
    return weights @ returns / weights.sum(1)


def growth(grid: np.ndarray, earned_from: float) -> np.ndarray:
    """By what factors a curve grows from point to point if nothing is earned before."""
    ends = np.arange(DAY, grid[-1], DAY)
    curve = smoothed((ends > earned_from).astype(float), ends, grid)
    return curve[1:] / curve[:-1]


def main() -> None:
    """Growth of the first points, and how many seeds earn as much as the mean of those that do."""
    curves = pd.read_csv(ROOT / "benchmark/closed/enduro/openai.csv")
    curves["error"] = (curves["high"] - curves["low"]) / 2
    earned = curves[curves["return"] > 0.3]
    share = (earned["error"] / earned["return"]).groupby([earned["page"], earned["algorithm"]])
    print("errors as shares of the mean, the largest", share.max().round(3), sep="\n")
    print(f"one of six: {5**0.5 / 6**0.5:.3f} for standard errors, {5**0.5:.3f} for deviations")

    for page, curve in curves[curves["algorithm"] == "ppo2"].groupby("page"):
        grid, mean = curve["global_step"].to_numpy(float), curve["return"].to_numpy()
        print(page, "grows by", np.round(mean[1:4] / mean[:3], 4))
        for earned_from in (100_000, 200_000, 300_000):
            print(f"  nothing before {earned_from:,}:", np.round(growth(grid, earned_from)[:3], 4))
        error = curve["error"].to_numpy()
        # k of n seeds at the same return and the others at 0: (std / mean)^2 = (n - k) / k.
        seeds = SEEDS / (1 + SEEDS * (error / mean) ** 2)
        for steps in (0.1e6, 0.5e6, 0.7e6, 1e6, 1.5e6, 2e6, 3.1e6, 3.6e6, 4.1e6, 5e6):
            at = np.abs(grid - steps).argmin()
            print(f"  {grid[at]:9,.0f} steps: return {mean[at]:5.1f}, seeds {seeds[at]:.2f}")
        wait = (grid > 0.69e6) & (grid < 3.15e6)
        print(f"  from 0.7M to 3.1M: {seeds[wait].min():.2f} to {seeds[wait].max():.2f}")


if __name__ == "__main__":
    main()
