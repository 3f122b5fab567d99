"""The report is one file that needs nothing else, whatever is in the completions; in a real Chromium, where one is."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TrainerFactory
from synthetic_run import make_run
from test_completion_log import RECORD

from sdpo import Score, completion_log
from sdpo.completion_log import CompletionRecord, TokenValues
from sdpo.report import Selection, write_report
from sdpo.report.run import _spread, curves, log_history

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'>'
TRICKY = [
    HOSTILE,
    "\u202eevil\u202c",
    "\x00\x1b[31m\x7f",
    "\U0001f9ee\U0001f468\u200d\U0001f469",
    "\u05e9\u05dc\u05d5\u05dd",
    "",
    "\n",
    "\t",
    "$title ${x}",
]


def attempt(**changes: Any) -> CompletionRecord:
    """A taught attempt of three tokens."""
    values = TokenValues(
        student_logp=[-0.1, -2.0, -0.5], entropy=[0.5, 1.0, 0.1], credit=[0.0, -3.0, 1.0], divergence=[0.0, 1.5, 0.4],
        student_top=[["a"], ["b", "x"], ["c"]], student_top_prob=[[0.9], [0.6, 0.004], [0.6]],
        teacher_top=[["a"], ["z"], ["c"]], teacher_top_prob=[[0.9], [0.8], [0.7]],
    )  # fmt: skip
    base = replace(
        RECORD, completion="abc", token_ids=[1, 2, 3], token_texts=["a", "b", "c"], is_success=False, reward=0.0,
        prompt="the question", teacher_prompt="the question, shown: right answer, told: wrong", feedback="wrong",
        demonstration=1, demonstration_source="sibling",
        demonstration_text="right answer", shown_feedback="wrong", is_distilled=True, values=values,
    )  # fmt: skip
    return replace(base, **changes)


def run_of(folder: Path, *steps: list[CompletionRecord]) -> Path:
    where = folder / "completions"
    where.mkdir(parents=True)
    for step, records in enumerate(steps, start=1):
        completion_log.write_completions(where, step, records)
        completion_log.append_metrics(where, {"step": step, "reward": step / 10, "entropy": 1.0, "other/metric": 2})
    return folder


class Elements(html.parser.HTMLParser):
    """Elements of a page, and what is in its blobs."""

    def __init__(self, page: str):
        super().__init__()
        self.names: list[str] = []
        self.blobs: dict[str, Any] = {}
        self._open: str | None = None
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        self.names.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self._open = found.get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.blobs[self._open.removeprefix("blob-")] = json.loads(zlib.decompress(base64.b64decode(data)))
            self._open = None


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_attempt_and_nothing_of_it_as_markup(tmp_path: Path) -> None:
    records = [
        attempt(row=i, completion=text, token_texts=[text, text, text], feedback=text) for i, text in enumerate(TRICKY)
    ]
    run = run_of(tmp_path / HOSTILE.replace("/", "_"), records)
    assert write_report(run, tmp_path / "r.html") == {
        "steps": 1, "attempts": len(TRICKY), "bytes": (tmp_path / "r.html").stat().st_size,
    }  # fmt: skip
    page = (tmp_path / "r.html").read_text()
    found = Elements(page)
    assert found.blobs["index-0"]["completion"] == TRICKY
    texts = found.blobs["tokens"]
    assert [texts[row["tokens"][0]] for row in found.blobs["detail-0"]["rows"]] == TRICKY
    assert "img" not in found.names and "owned" not in re.sub(r"&lt;[^<]*", "", page)
    # Nothing is fetched: no address, and a policy that allows none.
    assert set(found.links) == {"#attempts", "data:,"} and "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_numbers_are_hundredths_and_unlikely_alternatives_are_left_out(tmp_path: Path) -> None:
    write_report(run_of(tmp_path / "run", [attempt()]), tmp_path / "r.html")
    found = Elements((tmp_path / "r.html").read_text()).blobs
    [row] = found["detail-0"]["rows"]
    assert row["credit"] == [0, -300, 100] and row["student_logp"] == [-10, -200, -50]
    assert row["student"]["n"] == [1, 1, 1] and row["student"]["p"] == [900, 600, 600]  # 0.004 is below 0.005
    assert [found["tokens"][i] for i in row["teacher"]["t"]] == ["a", "z", "c"]
    assert found["index-0"]["mean_credit"] == [133.33]  # (0 + 3 + 1) / 3 nats, in hundredths
    assert found["index-0"]["strip"] == ["mdp"]  # -3 nats: 9 letters below m; 1 nat: 3 above


def test_not_a_number_and_infinity_do_not_stop_the_report(tmp_path: Path) -> None:
    bad = float("nan"), float("inf"), -float("inf")
    record = attempt(values=TokenValues(student_logp=list(bad), credit=list(bad), entropy=list(bad)), reward=bad[0])
    write_report(run_of(tmp_path / "run", [record]), tmp_path / "r.html")
    [row] = Elements((tmp_path / "r.html").read_text()).blobs["detail-0"]["rows"]
    assert row["credit"] == [0, 9999, -9999]


def test_steps_are_selected_and_thinned_out_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *[[attempt(row=i) for i in range(4)] for _ in range(10)])
    chosen = write_report(run, tmp_path / "r.html", selection=Selection(first_step=3, last_step=8, max_attempts=12))
    assert (chosen["steps"], chosen["attempts"]) == (3, 12)  # 12 attempts are 3 steps of 4
    assert Elements((tmp_path / "r.html").read_text()).blobs["meta"]["numLeftOut"] == 3
    assert _spread({1: 5, 2: 5, 3: 5}, 3) == [1]  # one step at least
    with pytest.raises(ValueError, match="steps 1 to 10, and none from 11"):
        write_report(run, tmp_path / "r.html", selection=Selection(first_step=11))


def test_curves_come_from_where_the_log_reaches_furthest(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [attempt()], [attempt()])
    for step, name in ((5, "checkpoint-5"), (4, "checkpoint-4")):
        (run / name).mkdir()
        history = [{"step": s, "reward": 0.5, "note": "text", "nan": float("nan")} for s in range(1, step + 1)]
        (run / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    found = curves(log_history(run))
    assert found == {"reward": [(s, 0.5) for s in range(1, 6)]}
    shutil.rmtree(run / "checkpoint-5")
    shutil.rmtree(run / "checkpoint-4")
    assert curves(log_history(run))["reward"] == [(1, 0.1), (2, 0.2)]


def test_the_credit_has_its_curve_where_the_run_logged_none(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [attempt(), attempt(row=1)], [attempt(values=TokenValues())], [attempt()])
    write_report(run, tmp_path / "r.html")
    found = Elements((tmp_path / "r.html").read_text()).blobs["meta"]["curves"]
    assert found["credit/mean"] == [[1, pytest.approx(-2 / 3)], [3, pytest.approx(-2 / 3)]]  # (0 - 3 + 1) / 3
    completion_log.append_metrics(run / "completions", {"step": 3, "credit/mean": 0.5})
    write_report(run, tmp_path / "r.html")
    assert Elements((tmp_path / "r.html").read_text()).blobs["meta"]["curves"]["credit/mean"] == [[3, 0.5]]


def test_the_command_says_what_it_wrote_and_what_it_lacks(tmp_path: Path) -> None:
    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sdpo.report", *map(str, arguments)], capture_output=True, text=True
        )

    run = run_of(tmp_path / "run", [attempt()])
    result = command(run)
    assert (result.returncode, result.stderr) == (0, "") and "1 attempts of 1 steps" in result.stdout
    assert (run / "report.html").exists()
    (tmp_path / "empty").mkdir()
    result = command(tmp_path / "empty")
    assert result.returncode == 1 and "Set log_completions=True" in result.stderr


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        # In a container there is no sandbox for it, and little shared memory.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    untaught = attempt(
        row=1, is_success=True, reward=1.0, is_distilled=False, values=TokenValues(), demonstration=None,
        demonstration_source=None,
        demonstration_text=None, feedback=None, shown_feedback=None, teacher_prompt="the question",
        completion="right answer",
    )  # fmt: skip
    tricky = [
        attempt(
            row=2 + i, group=1 + i, completion=text, token_texts=[text, "b", text], feedback=text or None,
            teacher_prompt=f"the question, {text}",
            shown_feedback=text or None,
        )
        for i, text in enumerate(TRICKY)
    ]  # fmt: skip
    second = [attempt(completion="second step needle")]
    write_report(run_of(folder / HOSTILE.replace("/", "_"), [attempt(), untaught, *tricky], second), folder / "r.html")
    return folder / "r.html"


class Page:
    """A page, with what it complained about."""

    def __init__(self, browser: Any, path: Path, **options: Any):
        self.errors: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = context.new_page()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        start = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]")
        self.seconds = time.perf_counter() - start

    def texts(self, selector: str) -> list[str]:
        return [element.inner_text() for element in self.page.query_selector_all(selector)]

    def until(self, expression: str) -> None:
        """Waits for it to hold. `wait_for_function` evaluates text in the page, which the page's policy forbids."""
        deadline = time.perf_counter() + 10
        while not self.page.evaluate(expression):
            assert time.perf_counter() < deadline, expression
            time.sleep(0.02)

    def attempt(self) -> str | None:
        return self.page.evaluate("document.documentElement.dataset.shown")


@pytest.fixture
def page(browser: Any, small_report: Path) -> Iterator[Page]:
    opened = Page(browser, small_report)
    yield opened
    opened.page.context.close()
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.browser
def test_hostile_completions_are_text(page: Page) -> None:
    assert "owned" not in page.page.title().split(" - ")[1]
    assert page.page.query_selector("img") is None
    page.page.fill("#search", "onerror")
    page.until("document.getElementById('count').textContent.startsWith('1 of')")
    assert HOSTILE[:40] in page.texts(".row-text")[0]
    page.page.click(".row")
    page.until("document.querySelector('.token')?.textContent.includes('onerror')")
    assert page.texts(".token")[0] == HOSTILE
    assert page.page.title() != "owned"
    # Marks of writing direction and control characters are written out.
    page.page.fill("#search", "evil")
    page.until("document.querySelector('.row-text').textContent.includes('U+202E')")
    page.page.click(".row")
    page.until("document.querySelector('.token')?.textContent.includes('U+202E')")
    text = page.page.evaluate("document.body.textContent.replace(/[A-Za-z0-9+/=]{200,}/g, '')")
    assert text.count("\u2039U+202E\u203a") >= 5 and "\u202e" not in text  # list, token, prompt, feedback, story


@pytest.mark.browser
def test_the_strongest_lesson_comes_first_and_is_told_in_words(page: Page) -> None:
    assert page.attempt() == "0"
    story = page.texts(".story")[0]
    # exp(-2) = 13.5 % and exp(-2 - 3) = 0.7 %
    assert "a sibling that succeeded and the feedback" in story
    assert "differ most at b: student 14\u202f%, teacher 0.7\u202f%. It would say z (80\u202f%)" in story
    kinds = page.page.eval_on_selector_all(".token", "spans => spans.map(span => span.dataset.kind)")
    assert kinds == ["none", "neg", "pos"]
    assert page.texts("mark.demonstration") == ["right answer"] and page.texts("mark.feedback") == ["wrong"]
    assert page.texts(".pane h3") == ["Teacher prompt", "Feedback", "Demonstration\nrow 1"]


@pytest.mark.browser
def test_a_token_says_more_when_pointed_at_and_when_focused(page: Page) -> None:
    card = page.page.locator("#card")
    assert card.is_hidden()
    page.page.hover(".token >> nth=1")
    assert card.is_visible() and "20 times less likely" in card.inner_text()  # exp(3)
    assert "Teacher would say\nz\n80\u202f%" in card.inner_text()
    page.page.mouse.move(0, 0)
    assert card.is_hidden()
    page.page.focus("#list")
    page.page.keyboard.press("Enter")  # to the strongest token
    assert card.is_visible()
    assert "credit \u22123.00 nats" in page.page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.page.keyboard.press("ArrowRight")
    assert "2.7 times likelier" in card.inner_text()  # exp(1)
    page.page.keyboard.press("Escape")
    assert card.is_hidden() and page.page.evaluate("document.activeElement.id") == "list"


@pytest.mark.browser
def test_the_list_is_filtered_ordered_and_walked_by_keyboard(page: Page) -> None:
    total = len(TRICKY) + 3
    assert page.texts("#count") == [f"{total} attempts"]
    for selector, value, number in (("#outcome", "success", 1), ("#taught", "no", 1), ("#feedback", "no", 2)):
        page.page.select_option(selector, value)
        page.until(f"document.getElementById('count').textContent === '{number} of {total} attempts'")
        page.page.click("#clear")
        page.until(f"document.getElementById('count').textContent === '{total} attempts'")
    page.page.fill("#first-step", "2")
    page.until("document.getElementById('count').textContent.startsWith('1 of')")
    assert page.texts(".row-text") == ["second step needle"]
    page.page.click("#clear")
    page.page.select_option("#order", "first")
    page.until("document.querySelectorAll('.row')[1].id === 'attempt-1'")  # the one that was not taught came last
    page.page.keyboard.press("/")
    assert page.page.evaluate("document.activeElement.id") == "search"
    page.page.keyboard.press("Escape")
    for _ in range(2):
        page.page.keyboard.press("ArrowDown")
    page.until("document.documentElement.dataset.shown === '2'")
    assert page.page.get_attribute("#list", "aria-activedescendant") == "attempt-2"
    page.page.keyboard.press("End")
    page.until(f"document.documentElement.dataset.shown === '{total - 1}'")


@pytest.mark.browser
def test_an_attempt_that_is_not_taught_says_so_and_leads_to_its_siblings(page: Page) -> None:
    page.page.click(".sibling >> nth=1")
    page.until("document.documentElement.dataset.shown === '1'")
    assert "No loss trains on this attempt" in page.page.inner_text("#detail")
    assert page.page.eval_on_selector_all(".token", "spans => spans.every(s => s.dataset.kind === 'none')")
    assert page.page.url.endswith("#attempt=1")


@pytest.mark.browser
def test_the_tint_follows_what_is_chosen_and_its_scale(page: Page) -> None:
    sizes = "spans => spans.map(span => Number(span.style.getPropertyValue('--t')))"
    assert page.page.eval_on_selector_all(".token", sizes) == [0, 1, 0.595]  # (1 / 2) ** 0.75
    page.page.select_option(".scale select", "4")
    assert page.page.eval_on_selector_all(".token", sizes)[1] == 0.806  # (3 / 4) ** 0.75
    page.page.click("text=Surprise")
    assert page.page.eval_on_selector_all(".token", "spans => spans.map(span => span.dataset.kind)") == ["one"] * 3


@pytest.mark.browser
def test_curves_are_drawn_and_read_by_keyboard(page: Page) -> None:
    assert page.texts("#charts figcaption")[0] == "Reward"
    page.page.focus(".plot")
    page.page.keyboard.press("Home")
    assert "step 1" in page.texts(".reading")[0] and "0.1" in page.texts(".reading")[0]
    page.page.click("#more summary")
    assert page.texts("#more figcaption") == ["other/metric"]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_tint(browser: Any, small_report: Path, scheme: str) -> None:
    opened = Page(browser, small_report, color_scheme=scheme)
    contrast = """() => {
        const context = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
        const rgb = (...colours) => {
            for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
            return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const base = getComputedStyle(document.querySelector('.tokens')).backgroundColor;
        return [...document.querySelectorAll('.token')].map(span => {
            const style = getComputedStyle(span);
            const [a, b] = [light(rgb(style.color)), light(rgb(base, style.backgroundColor))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });
    }"""
    assert min(opened.page.evaluate(contrast)) >= 4.5  # WCAG AA
    opened.page.click("#theme")  # automatic -> light
    assert opened.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert opened.errors == []


@pytest.mark.browser
def test_on_a_phone_list_and_attempt_take_turns(browser: Any, small_report: Path) -> None:
    opened = Page(browser, small_report, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert opened.page.is_visible("#list") and opened.page.is_hidden("#detail")
    opened.page.tap(".row >> nth=0")
    opened.page.wait_for_selector("#detail", state="visible")
    assert opened.page.is_hidden("#list")
    opened.page.tap(".token >> nth=1")
    box = opened.page.locator("#card").bounding_box()
    assert box["x"] == 0 and box["width"] == 390 and box["y"] + box["height"] == pytest.approx(844, abs=1)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.page.tap("text=all attempts")
    assert opened.page.is_visible("#list")
    assert opened.errors == []


@pytest.mark.browser
@pytest.mark.slow
def test_ten_thousand_attempts_load_within_three_seconds(browser: Any, tmp_path: Path) -> None:
    written = write_report(make_run(tmp_path / "run"), tmp_path / "r.html")
    assert written["attempts"] >= 10_000
    opened = Page(browser, tmp_path / "r.html")
    assert opened.seconds < 3 and opened.errors == []
    assert len(opened.page.query_selector_all(".row")) < 60  # only those in sight
    opened.page.focus("#list")
    start = time.perf_counter()
    opened.page.keyboard.press("End")
    place = "document.querySelector('.row[aria-selected=true]')?.getAttribute('aria-posinset')"
    opened.until(f"{place} === '{written['attempts']}'")
    assert len(opened.page.query_selector_all(".row")) < 60
    opened.page.fill("#search", "janet 42")
    opened.until("document.getElementById('count').textContent.includes(' of ')")
    assert time.perf_counter() - start < 3
    assert 0 < int(opened.texts("#count")[0].split()[0].replace("\u202f", "")) < 1000


@pytest.mark.browser
def test_a_real_run_opens(browser: Any, make_trainer: TrainerFactory, tmp_path: Path) -> None:
    trainer = make_trainer(
        rewards=(Score(1.0), Score(0.0, "w30 w31"), Score(0.0, "w32"), Score(0.0)),
        include_environment_feedback=True,
        distillation_mode="topk_logits",
        distillation_topk=5,
        prompts=["w10", "w11"],
        max_steps=3,
        log_completions=True,
        num_completions_to_print=0,
    )
    trainer.train()
    write_report(Path(trainer.args.output_dir), tmp_path / "r.html")
    opened = Page(browser, tmp_path / "r.html")
    assert opened.texts("#count") == ["12 attempts"] and opened.errors == []
    assert {"Reward", "Distillation lossnats"} <= set(opened.texts("#charts figcaption"))
    opened.page.focus("#list")
    opened.page.keyboard.press("Enter")
    assert "Teacher would say" in opened.page.inner_text("#card")
