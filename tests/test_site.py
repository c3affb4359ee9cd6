"""The site in docs/: up to date, whole, links sound; in a browser, what it shows and computes."""

import json
import random
import re
import shutil
from urllib.parse import unquote

import pytest
import torch

import ppo_continuous_action as ppo
from benchmark import annotate, site, tables
from benchmark.results import by_environment
from benchmark.suites import SCRIPTS, SUITES

CHROMIUM = shutil.which("chromium")
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs Debian's package chromium"),
]
PAGES = sorted(x.name for x in site.DOCS.glob("*.html"))
KINDS = [x for x in PAGES if x.partition("_")[0] not in ("ppo", "grpo", "dpo")]  # and index.html
WIDTHS = (360, 1600)
LOOKS = [(1600, "light"), (1600, "dark"), (360, "light")]


# --- What is built ---


@pytest.fixture(scope="module")
def built(committed):
    return site.build(committed)


@pytest.fixture(scope="module")
def texts(built):
    return {name: x.decode() for name, x in built.items() if not name.endswith(".png")}


def test_the_site_is_that_of_the_scripts_and_the_committed_results(built):
    """Fails after changes of scripts or results until `python -m benchmark site` has run."""
    kept = {x.relative_to(site.DOCS).as_posix(): x for x in site.DOCS.rglob("*") if x.is_file()}
    assert sorted(kept) == sorted(built)
    assert [name for name, path in kept.items() if path.read_bytes() != built[name]] == []


def test_the_site_is_small(built):
    assert sum(map(len, built.values())) <= 2_600_000


def test_links_and_anchors_of_the_site_resolve(built, texts):
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', x)) for name, x in texts.items()}
    broken = []
    for name in (x for x in built if x.endswith(".html")):
        assert len(re.findall(r'\bid="', texts[name])) == len(anchors[name]), f"{name}: ids twice"
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', texts[name]):
            page, _, anchor = link.partition("#")
            if link.startswith(("https://", "data:")):
                continue
            known, choice = anchors.get(page or name, set()), anchor.startswith("suite=")
            if (page or name) not in built or not (choice or unquote(anchor) in known | {""}):
                broken.append((name, link))
    assert broken == []


def test_choices_in_links_to_the_runs_exist(texts):
    links = {x for text in texts.values() for x in re.findall(r'"[\w.]*#(suite=[^"]+)"', text)}
    for link in links:
        suite, *lines = re.fullmatch(r"suite=(\w+)(?:&amp;lines=([\d,]+))?", link).groups()
        known = json.loads(re.search(r",(\{.*\})\)", texts[f"data/{suite}.js"])[1])["lines"]
        assert max(map(int, (lines[0] or "0").split(","))) < len(known)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_line_of_a_script_is_lost_and_each_tag_stands_at_its_statement(name):
    script = annotate.Source(name)
    shown = [number for x in script.segments for number, *_ in x.lines]
    assert shown == sorted(set(shown))
    tags = [i for i, x in enumerate(script.rows, 1) if re.match(r" *# (Detail|Extra|Devia)", x)]
    assert list(script.tags) == tags
    notes = [x for segment in script.segments for x in segment.notes]
    assert {id(x) for x in script.tags.values()} <= set(map(id, notes))
    moved = " ".join(f"{x.text} {x.sentence} {x.title}" for x in notes) + script.doc
    moved = re.sub(r"\W+", "", re.sub(r"<.*?>", "", moved.replace("&lt;", "<")))
    sections = [x.section for x in script.segments if x.section]
    for number in sorted(set(range(1, len(script.rows) + 1)) - set(shown)):
        text = script.rows[number - 1].strip(' "#')
        banner = re.search(r"^(===|---|///)", text) or any(x in text for x in sections)
        known = re.sub(r"\W+", "", re.sub(r"[(\[].*|^(Detail|Extra|Dev).*?: ", "", text)) in moved
        assert banner or known or number < 7, f"line {number} is nowhere: {text}"
    for line, note in script.tags.items():
        (segment,) = (x for x in script.segments if note in x.notes)
        below = [n for n, _, tag in segment.lines if n > line and note.short in (tag or "").split()]
        assert below and below[0] - line <= 6


def test_the_short_scripts_tags_have_the_reasons_of_the_full_ones():
    short, full = annotate.Source(annotate.SHORT), annotate.Source(annotate.HOME)
    known = {x.title: (x.sentence, x.source) for x in full.tags.values()}
    assert len(short.tags) > 20 and site.page_of(annotate.SHORT) == "index.html"
    for note in short.tags.values():
        assert (note.sentence, note.source) == known[note.title] and note.sentence


def test_originals_are_those_of_the_commits_that_the_scripts_name():
    docs = "".join(annotate.Source(name).doc for name in SCRIPTS)
    named = re.findall(r"(\w+) = ([\w-]+)/\s*([\w-]+)@(\w+)", docs)
    for series, owner, repository, commit in named:
        assert f"/{owner}/{repository}/blob/{commit}/" in annotate.ORIGINALS[f"{series}: "]
    assert {f"{x}: " for x, *_ in named} == annotate.ORIGINALS.keys() - {""}


def test_every_formula_belongs_to_something():
    names = set()
    for name in SCRIPTS:
        script = annotate.Source(name)
        own = {x.title for y in script.segments for x in y.notes}
        names |= own | {f"{name}: {x}" for x in own}
    assert annotate.FORMULAS.keys() - names == set()


def test_bugs_stand_beside_their_lines_and_link_to_their_runs(committed):
    bugs = [x for x in site.bugs_of(committed) if x["suite"] == "bugs"]
    lines = site.suite_data(SUITES["bugs"], committed)["lines"]
    for bug in bugs:
        healthy, own = bug["link"].removeprefix("#suite=bugs&lines=").split(",")
        assert lines[int(own)]["label"] == bug["label"]
        assert lines[int(healthy)]["label"].startswith("healthy")
    script = annotate.Source("ppo_continuous_action.py")
    beside = {
        x["label"]: [note.title for note in segment.notes]
        for segment in script.segments
        for x in site.inside(segment, script, bugs)
    }
    assert "clipped surrogate objective" in beside["policy loss with the wrong sign"]
    assert "advantage normalization" in beside["advantages not normalized"]
    (sign,) = (x for x in bugs if x["label"] == "policy loss with the wrong sign")
    assert re.match(
        r"Hopper-v4: return -\d+%.*, warned in \d of \d: check/update \(.*; HalfCheetah-v4: ",
        sign["symptom"],
    )


def test_recorded_policies_are_those_of_the_committed_runs(committed):
    """What is watched is not changed: PPO with seed 1 comes out as in the suite `rlhf`."""
    (run,) = (
        x.record for x in by_environment("rlhf", "", committed)["reviews"] if x.record["seed"] == 1
    )
    known = {
        x["kl_coef"]: x for x in run["models"].values() if x.get("kl_mode") in ("none", "fixed")
    }
    recorded = {
        x["beta"]: x for x in json.loads((committed.results / "reviews.json").read_text())["models"]
    }
    assert len(known) == 2
    for beta, model in known.items():
        for name in ("gold", "proxy", "kl"):
            assert recorded[beta][name] == round(model[f"objective/{name}"], 3)


# --- In a browser ---


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser, request):
    """A page that fails on messages in the console and on requests that leave the disk."""
    context = browser.new_context(
        viewport={"width": getattr(request, "param", 1600), "height": 900}
    )
    page, wrong = context.new_page(), []
    page.on("console", lambda x: wrong.append(x.text))
    page.on("pageerror", lambda x: wrong.append(str(x)))
    page.on("request", lambda x: x.url.startswith(("file:", "data:")) or wrong.append(x.url))
    yield page
    context.close()
    assert wrong == []


def visit(tab, name, choice=""):
    tab.goto((site.DOCS / name).as_uri() + choice)
    if name in ("runs.html", "play.html"):
        tab.wait_for_selector("svg.chart path", state="attached")
    return tab


class TestPages:
    pytestmark = in_browser

    @pytest.mark.parametrize("tab", WIDTHS, indirect=True)
    @pytest.mark.parametrize("name", PAGES)
    def test_it_fits_the_width_without_errors_and_requests(self, tab, name):
        visit(tab, name)
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        width, room = tab.evaluate(sizes)
        assert width <= room

    @pytest.mark.parametrize(("tab", "scheme"), LOOKS, indirect=["tab"])
    @pytest.mark.parametrize("name", KINDS)
    def test_axe_finds_no_serious_problem(self, tab, name, scheme):
        from axe_playwright_python.sync_playwright import Axe

        tab.emulate_media(color_scheme=scheme)
        found = Axe().run(visit(tab, name), options={"preload": False}).response["violations"]
        serious = [x for x in found if x["impact"] in ("serious", "critical")]
        assert [(x["id"], len(x["nodes"]), x["nodes"][0]["html"][:200]) for x in serious] == []

    @pytest.mark.parametrize("name", KINDS)
    def test_it_paints_within_a_second(self, tab, name):
        times = []
        for _ in range(5):
            visit(tab, name)
            tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            times.append(tab.evaluate(paint))
        assert min(times) < 1000


class TestNumbers:
    pytestmark = in_browser

    def test_the_clipped_objective_is_policy_loss(self, tab):
        rng, cases = random.Random(1), []
        for _ in range(200):
            cases.append([rng.uniform(0, 2), rng.gauss(0, 1), rng.uniform(0.05, 0.5)])
        found = visit(tab, "play.html").evaluate("x => x.map(y => clipped(...y))", cases)
        for (ratio, advantage, epsilon), own in zip(cases, found):
            logratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
            loss = ppo.policy_loss(logratio, torch.tensor([advantage]), epsilon)
            (gradient,) = torch.autograd.grad(-loss, logratio)
            assert own["value"] == pytest.approx(-loss.item(), abs=1e-6)
            assert own["gradient"] * ratio == pytest.approx(gradient.item(), abs=1e-6)

    def test_gae_is_gae(self, tab):
        rng, cases = random.Random(2), []
        for _ in range(200):
            steps = rng.randint(1, 12)
            rows = [[rng.gauss(0, 1) for _ in range(steps)] for _ in range(3)]
            done = [float(rng.random() < 0.3) for _ in range(steps)]
            cases.append([*rows, done, rng.random(), rng.random()])
        call = "x => x.map(y => gae(...y).advantages)"
        found = visit(tab, "play.html").evaluate(call, cases)
        for case, own in zip(cases, found):
            tensors = [torch.tensor(x, dtype=torch.float64)[:, None] for x in case[:4]]
            advantages, _ = ppo.gae(*tensors, *case[4:])
            assert own == pytest.approx(advantages[:, 0].tolist(), abs=1e-9)

    @pytest.mark.parametrize(
        ("suite", "environment", "variant"),
        [
            ("figure3", "HalfCheetah-v4", ""),
            ("ablation", "Walker2d-v4", "no-clip"),
            ("table1", "Hopper-v4", "fixed-3"),
        ],
    )
    def test_the_runs_page_shows_the_numbers_of_the_tables(
        self, tab, committed, suite, environment, variant
    ):
        visit(tab, "runs.html", f"#suite={suite}&environment={environment}")
        label = SUITES[suite].labels[suite, variant]
        row = tab.locator("#table tbody tr").filter(has=tab.get_by_text(label, exact=True))
        results = by_environment(suite, variant, committed)[environment]
        cells = tables.score_cells(tables.facts(results, "score"))
        assert row.locator("td").all_text_contents()[1:4] == list(cells.values())

    def test_a_link_keeps_what_is_chosen(self, tab):
        visit(tab, "runs.html", "#suite=ablation")
        tab.select_option("#environment", "HalfCheetah-v4")
        tab.wait_for_function("location.hash.includes('HalfCheetah')")
        tab.locator("#table input").nth(3).check()
        address, shape = tab.url, tab.inner_html("#runs-chart")
        visit(tab, "index.html")
        tab.goto(address)
        tab.wait_for_selector("svg.chart path", state="attached")
        assert tab.locator("#table input:checked").count() == 4
        assert tab.inner_html("#runs-chart") == shape

    def test_sliders_move_the_pictures(self, tab):
        visit(tab, "play.html")
        for slider in tab.locator("input[type=range]").all():
            figure = slider.locator("xpath=ancestor::figure")
            before = figure.locator("svg.chart").first.inner_html(), figure.inner_text()
            slider.focus()
            tab.keyboard.press("ArrowLeft")
            tab.keyboard.press("ArrowLeft")
            after = figure.locator("svg.chart").first.inner_html(), figure.inner_text()
            moved = before != after or slider.get_attribute("min") == slider.input_value()
            assert moved, slider.get_attribute("id")
