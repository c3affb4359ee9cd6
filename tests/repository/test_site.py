"""The site in docs/: up to date, whole, links sound; in a browser, what it shows and computes."""

import re
import shutil
import subprocess

import playwright.sync_api
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe

import ppo_continuous_action as ppo
from benchmark.site import annotate
from benchmark.site import build as site
from benchmark.suites import SCRIPTS

CHROMIUM = shutil.which("chromium")
KINDS = ("index.html", "ppo_atari.html", "play.html", "runs.html")
PAGES = [*map(site.page_of, SCRIPTS), "play.html", "runs.html"]


@pytest.fixture(scope="module")
def built(committed):
    return site.build(committed)


def test_the_site_is_that_of_the_scripts_and_the_committed_results(built):
    """Fails after changes of scripts or results until `python -m benchmark site` has run."""
    kept = {x.relative_to(site.DOCS).as_posix(): x for x in site.DOCS.rglob("*") if x.is_file()}
    kept = {name: x.read_bytes() for name, x in kept.items()}
    assert [x for x in kept.keys() | built.keys() if kept.get(x) != built.get(x)] == []
    assert sum(map(len, built.values())) <= 1_600_000


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve_and_a_page_says_what_it_is(built, page):
    text = built[page].decode()
    links = set(re.findall(r'\b(?:href|src)="([^"]*)"', text))
    assert {"../", "../README.md"} <= links and 'property="og:image" content="site.png"' in text
    assert re.search(r'<meta name="description" content="[^"]{50,250}">', text)
    for path, _, anchor in (x.partition("#") for x in links if not re.match("https:|data:", x)):
        if path.startswith("../"):
            last, file = int(anchor.partition("-L")[2] or 0), site.DOCS / path
            assert file.exists() and (not last or last <= file.read_text().count("\n")), path
        elif suite := re.fullmatch(r"suite=(\w+)(?:&amp;lines=([\d,]+))?", anchor):
            lines = built[f"data/{suite[1]}.js"].count(b'"label":')
            assert max(map(int, (suite[2] or "0").split(","))) < lines, anchor
        else:
            assert not anchor or built[path or page].count(f'id="{anchor}"'.encode()) == 1, anchor
            assert not path or path in built


def test_published_links_are_absolute(built, tmp_path):
    (tmp_path / "docs").mkdir()
    (copy := tmp_path / "docs/index.html").write_bytes(built["index.html"])
    command = re.search("run: (sed .+)", (site.ROOT / ".github/workflows/pages.yml").read_text())[1]
    place = {"REPOSITORY": "https://x/y", "SITE": "https://z"}
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=place)
    for link in ('href="https://x/y"', '"https://x/y/blob/HEAD/README.md"', '"https://z/site.png"'):
        assert link in copy.read_text() and "../" not in copy.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_line_is_lost_each_tag_stands_at_its_statement_and_formulas_are_whole(name):
    script = annotate.Source(name)
    shown = [number for x in script.segments for number, *_ in x.lines]
    notes = [x for segment in script.segments for x in segment.notes]
    moved = " ".join(f"{x.text} {x.sentence} {x.title}" for x in notes) + script.doc
    moved = re.sub(r"\W+", "", re.sub(r"<.*?>", "", moved.replace("&lt;", "<")))
    assert shown == sorted(set(shown))
    for number in {*range(7, len(script.rows) + 1)} - {*shown}:
        text = script.rows[number - 1].strip(' "#')
        words = re.sub(r"[(\[].*|^(Detail|Extra|Dev).*?: ", "", text)
        section = any(x.section and x.section in text for x in script.segments)
        assert section or re.match("---|///", text) or re.sub(r"\W+", "", words) in moved, text
    for line, note in script.tags.items():
        (segment,) = (x for x in script.segments if note in x.notes)
        below = [x for x, _, tag in segment.lines if note.short in (tag or "").split()]
        assert note.sentence and 0 < below[0] - line <= 6
    formulas = [annotate.formula(name, x.title) for x in notes]
    assert not any(re.search(r"&(?!lt;|gt;)|\\", x) for x in formulas)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_api.sync_playwright() as player:
        yield player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def visit(browser):
    """Open a page; fails on messages in the console and on requests that leave the disk."""
    wrong, page = [], browser.new_page()
    page.on("console", lambda x: wrong.append(x.text))
    page.on("pageerror", lambda x: wrong.append(str(x)))
    page.on("request", lambda x: x.url.startswith(("file:", "data:")) or wrong.append(x.url))

    def visit(name, width=1440, scheme="light"):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{site.DOCS.as_uri()}/{name}")
        if name.startswith(("runs", "play")):
            page.wait_for_selector("svg.chart path", state="attached")
        return page

    yield visit
    page.close()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's package chromium")
class TestInABrowser:
    @pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1440, "dark")])
    @pytest.mark.parametrize("name", PAGES)
    def test_a_page_fits_and_is_accessible(self, visit, name, width, scheme):
        page = visit(name, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if name not in KINDS:
            return
        found = Axe().run(page, options={"preload": False}).response["violations"]
        assert [x["id"] for x in found if x["impact"] in ("serious", "critical")] == []

    def test_it_computes_what_the_scripts_compute(self, visit):
        x = torch.rand(100, 3, dtype=torch.float64, generator=torch.manual_seed(1))
        call = "x => x.map(([r, a, e]) => clipped(2 * r, a - 0.5, e))"
        for (ratio, advantage, epsilon), own in zip(
            x, visit("play.html").evaluate(call, x.tolist())
        ):
            logratio = (2 * ratio)[None].log().requires_grad_()
            loss = ppo.policy_loss(logratio, advantage[None] - 0.5, epsilon.item())
            (gradient,) = torch.autograd.grad(-loss, logratio)
            assert own["value"] == pytest.approx(-loss.item(), abs=1e-9)
            assert own["gradient"] * 2 * ratio == pytest.approx(gradient.item(), abs=1e-9)
        steps = torch.randn(4, 50, dtype=torch.float64)
        steps[3] = (steps[3] > 0.5).double()  # done
        own = visit("play.html").evaluate("x => gae(...x, 0.9, 0.8).advantages", steps.tolist())
        advantages, _ = ppo.gae(*steps[..., None], 0.9, 0.8)
        assert own == pytest.approx(advantages[:, 0].tolist(), abs=1e-9)

    def test_a_slider_changes_its_figure_and_a_link_keeps_what_is_chosen(self, visit):
        page = visit("play.html")
        for slider in page.locator("input[type=range]").all():
            figure = slider.locator("xpath=ancestor::figure")
            before = figure.inner_html()
            slider.press("ArrowLeft")
            assert figure.inner_html() != before
        page = visit("runs.html#suite=bugs&lines=0,7&metric=approx_kl")
        page.select_option("#environment", "HalfCheetah-v4")
        page.wait_for_function("location.hash.includes('HalfCheetah')")
        shape = page.inner_html("#runs-chart")
        page.reload()
        page.wait_for_selector("svg.chart path", state="attached")
        assert page.inner_html("#runs-chart") == shape
