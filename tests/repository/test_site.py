"""The site: whole, links sound; in a browser, what it shows and computes."""

import ast
import html
import json
import re
import shutil
import subprocess

import playwright.sync_api
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe

import ppo_continuous_action as ppo
from benchmark.evidence.site import annotate
from benchmark.evidence.site import build as site
from benchmark.evidence.suites.scripts import SCRIPTS
from benchmark.lab.results import table_of

pytestmark = pytest.mark.slow  # building it takes longer than most tests together
CHROMIUM = shutil.which("chromium")
KINDS = ("index.html", "ppo_atari.html", "recipes.html", "play.html", "runs.html", "debugging.html")
CODE = [*map(site.page_of, SCRIPTS)]
TEXTS = [*map(site.page_of_text, site.TEXTS)]
PAGES = [*CODE, *TEXTS, "recipes.html", "play.html", "runs.html"]

# Of each group of lines: where it ends, and the boxes of its code and of its notes.
GROUPS = """() => [...document.querySelectorAll(".group")].map((group) => {
  const box = (x) => x.getBoundingClientRect().toJSON();
  const code = [...group.querySelectorAll(".code")].map(box);
  return {
    bottom: box(group).bottom,
    code: { ...code[0], bottom: Math.max(...code.map((x) => x.bottom)) },
    notes: [...group.querySelectorAll(".note")].map(box),
  };
})"""


@pytest.fixture(scope="module")
def built(committed):
    return site.build(committed)


def test_the_site_is_small(built):
    assert sum(map(len, built.values())) <= 2_300_000


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve_and_a_page_says_what_it_is(built, page):
    text = built[page].decode()
    links = {x.replace("&amp;", "&") for x in re.findall(r'\b(?:href|src)="([^"]*)"', text)}
    assert {"../", "../README.md"} <= links and 'property="og:image" content="site.png"' in text
    assert re.search(r'<meta name="description" content="[^"]{50,250}">', text)
    for path, _, anchor in (x.partition("#") for x in links if not re.match("https:|data:", x)):
        if path.startswith("../"):
            last, file = int(anchor.partition("-L")[2] or 0), site.DOCS / path
            assert file.exists() and (not last or last <= file.read_text().count("\n")), path
        elif suite := re.fullmatch(r"suite=(\w+)(?:&lines=([\d,]+))?", anchor):
            lines = built[f"data/{suite[1]}.js"].count(b'"label":')
            assert max(map(int, (suite[2] or "0").split(","))) < lines, anchor
        else:
            assert not anchor or built[path or page].count(f'id="{anchor}"'.encode()) == 1, anchor
            assert not path or path in built


def test_every_bug_is_at_its_lines(built):
    """All that the scripts' pages show together; a note that is called otherwise would lose it."""
    shown = re.findall(r">Bug: (.*?)</a>", "".join(built[x].decode() for x in CODE[1:]))
    names = [x["label"] for x in json.loads(site.BUGS.read_text())]
    assert sorted(map(html.unescape, shown)) == sorted(names) and len({*names}) > 30


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
        below = [x for x, _, marks in segment.lines if note in marks.begins]
        own = name in annotate.HOMES and note.label == "Extra"  # no other script has a reason
        assert (note.sentence or own) and 0 < below[0] - line <= 6
    formulas = [annotate.formula(name, x.title) for x in notes]
    assert not any(re.search(r"&(?!lt;|gt;)|\\", x) for x in formulas)


def test_recipes_are_listed_and_no_line_of_them_is_lost(built):
    page = built["recipes.html"].decode()
    listed, *sections = page.split('<section class="recipe"')
    assert len(sections) == len(site.RECIPES) > 10
    for path, section in zip(site.RECIPES, sections):
        text = path.read_text()
        doc = ast.get_docstring(ast.parse(text))
        assert f"{path.name}</code></a>: {html.escape(doc.partition('.')[0])}." in listed
        code = re.search("<pre class=.*</pre>", section, re.DOTALL)[0]
        code = html.unescape(re.sub("<.*?>", "", code))
        rows = [x for x in text.replace(f'"""{doc}\n"""', "").splitlines() if x.strip()]
        assert [x for x in code.splitlines() if x.strip()] == rows
        assert len(re.findall("<pre>    |<pre>python -m recipes", section)) == 1


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

    def visit(name, width=1440, scheme="light", height=900):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{site.DOCS.as_uri()}/{name}")
        if name.startswith(("runs", "play")):
            last = "#rlhf-chart" if name.startswith("play") else "#runs-chart"
            page.wait_for_selector(f"{last} path.thick", state="attached")
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
        sizes = page.eval_on_selector_all(".code", "x => x.map(y => y.scrollWidth - y.clientWidth)")
        if width == 360 and name in CODE:  # code wraps on a phone
            assert len(sizes) > 10 and max(sizes) <= 0
        if name not in KINDS:
            return
        found = Axe().run(page, options={"preload": False}).response["violations"]
        assert [x["id"] for x in found if x["impact"] in ("serious", "critical")] == []

    @pytest.mark.parametrize("width", [390, 1280])
    @pytest.mark.parametrize("name", CODE)
    def test_no_formula_is_cut(self, visit, name, width):
        page = visit(name, width)
        sizes = page.eval_on_selector_all("math", "x => x.map(y => y.scrollWidth - y.clientWidth)")
        assert len(sizes) >= 5 and max(sizes) <= 0

    def test_on_a_phone_menus_are_whole_and_wide_tables_say_that_they_continue(self, visit):
        for name in "runs.html", "benchmark_games.html":
            page = visit(name, 390)
            cut = page.eval_on_selector_all(
                "nav, select", "x => x.map(y => y.scrollWidth - y.clientWidth)"
            )
            assert max(cut) <= 0, name
            sign = "x => getComputedStyle(x, '::before').content"
            assert "Scroll" in page.locator(".scroll").first.evaluate(sign), name
        page = visit("benchmark_games.html", 1280)
        assert page.locator(".scroll").first.evaluate(sign) == "none"

    @pytest.mark.parametrize("name", CODE)
    def test_a_link_to_a_detail_shows_its_note_and_its_line(self, visit, name):
        """Next to it, or below the code."""
        page = visit(name, 1366, height=768)
        for anchor in page.eval_on_selector_all(".tags a", "x => x.map(y => y.hash)"):
            page.evaluate("x => { location.hash = x }", anchor)
            page.wait_for_function("x => document.querySelector(x).matches('.lit')", arg=anchor)
            line = page.locator(f"code[data-of~='{anchor[1:]}']").first.bounding_box()
            note = page.locator(anchor).bounding_box()
            assert 40 <= line["y"] < 768 and 40 <= note["y"] < 740, anchor
            below = note["y"] > line["y"]
            assert line["x"] + line["width"] <= note["x"] or below, anchor

    @pytest.mark.parametrize("width", [1200, 1400])
    @pytest.mark.parametrize("name", CODE)
    def test_code_has_no_gap_where_notes_are_longer(self, visit, name, width):
        """Only one note alone may reach below its code. No two notes overlap."""
        for group in visit(name, width).evaluate(GROUPS):
            code, notes = group["code"], group["notes"]
            left = [x["bottom"] for x in [code, *notes] if x["left"] < code["right"]]
            lowest = max(x["bottom"] for x in [code, *notes])
            assert lowest - max(left) < 170 and lowest <= group["bottom"], notes
            for i, x in enumerate(notes):
                for y in notes[:i]:
                    apart = x["left"] >= y["right"] or y["left"] >= x["right"]
                    assert apart or x["top"] >= y["bottom"] - 1 or y["top"] >= x["bottom"] - 1

    @pytest.mark.parametrize("name", ["debugging.html", "details.html", "benchmark.html"])
    def test_text_is_in_the_middle(self, visit, name):
        box = visit(name, 1400).locator(".page > p").first.bounding_box()
        assert box["width"] < 800 and abs(box["x"] + box["width"] / 2 - 700) < 10

    @pytest.mark.parametrize("name", ["index.html", "runs.html"])
    def test_on_a_phone_all_links_are_in_one_menu_that_is_folded(self, visit, name):
        page = visit(name, 390)
        assert page.locator("nav:visible").count() == 0
        assert page.locator("main").bounding_box()["y"] < 60
        page.get_by_role("button", name="Menu").click()
        of_scripts = len(SCRIPTS) * (name == "index.html")
        assert page.locator("nav:visible a").count() == 9 + of_scripts

    @pytest.mark.parametrize("name", TEXTS)
    def test_on_a_phone_only_drawings_scroll_sideways(self, visit, name):
        sizes = visit(name, 390).eval_on_selector_all(
            "pre:not(.drawing)", "x => x.map(y => y.scrollWidth - y.clientWidth)"
        )
        assert max(sizes, default=0) <= 0

    def test_a_number_in_the_code_marks_its_note_and_its_lines(self, visit):
        page = visit("index.html", 1366)
        page.hover("code[data-of~='detail-8']")
        assert page.locator("#detail-8.lit").count() == 1
        page.focus(".tags a[href='#detail-9']")
        assert page.locator(".note.lit").evaluate_all("x => x.map(y => y.id)") == ["detail-9"]
        assert {*page.locator("code.lit").evaluate_all("x => x.map(y => y.dataset.of)")} == {
            "detail-9"
        }

    def test_chosen_runs_have_colors_of_their_own_and_names(self, visit):
        """Links from bugs, an ablation, and a page of text."""
        for link in ("suite=bugs&lines=0,8", "suite=bugs&lines=0,24", "suite=ablation&lines=0,16"):
            page = visit(f"runs.html#{link}")
            strokes = page.locator("path.thick").evaluate_all("x => x.map(y => y.style.stroke)")
            names = page.locator("svg text.name").all_text_contents()
            assert len(strokes) == len(set(strokes)) == len(names) == 2
            page.goto("about:blank")

    def test_a_bug_comes_with_its_healthy_runs_and_keeps_the_first_update(self, visit):
        page = visit("runs.html#suite=bugs&metric=clipfrac")
        assert page.locator("#table input:checked").count() == 2
        page.get_by_label("minibatches not shuffled").check()
        page.get_by_label("advantages flattened in another order").check()
        assert page.get_by_label("healthy, 8 environments").is_checked()
        metric = page.evaluate("held.bugs.lines[0].curves['Hopper-v4'].metrics.clipfrac")
        assert metric["first"] == 2048 and all(len(x) >= 40 for x in metric["runs"].values())
        first = page.evaluate(
            "seedsOf(held.bugs.lines[0].curves['Hopper-v4'].metrics.clipfrac)[0][0]"
        )
        curves = table_of(site.BUGS.with_name("curves.csv"))
        own = curves.query("environment == 'Hopper-v4' and variant == 'healthy'")
        assert first == pytest.approx(own["clipfrac"].iloc[0], abs=1e-3)

    def test_a_link_to_a_bug_opens_its_lines(self, visit):
        page = visit("debugging.html#bug-policy-loss-with-the-wrong-sign")
        assert page.get_by_text("-advantages * ratio").first.is_visible()

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
        advantages = ppo.gae(*steps[..., None], 0.9, 0.8)
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
