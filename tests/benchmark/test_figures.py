"""A figure is written only if it shows something else than the file that is there."""

import matplotlib.pyplot as plt

from benchmark.report import plots


def test_a_figure_that_shows_the_same_is_not_written_again(tmp_path):
    def figure(*dots):
        made, axes = plt.subplots()
        axes.plot([0, 1], [0, 1], label="line")
        axes.plot(dots, dots, "o")
        return made

    path = plots.save(figure, tmp_path / "new" / "figure.png")
    written = path.stat().st_mtime_ns
    plots.save(figure, path)
    assert path.stat().st_mtime_ns == written
    plots.save(lambda: figure(0.5), path)
    assert path.stat().st_mtime_ns > written
