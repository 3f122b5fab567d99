"""What the README and docs/ say can be done: Python blocks run, commands name what exists, names and links are real.

The blocks of a page run in order, in one namespace and in an empty folder, as a reader would type them. Ids of models
resolve offline, from a cache laid out as the hub's, to the two-layer model of conftest.py.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import generate_metrics_docs
import pytest
import sdpo_code
import sdpo_instructions
import sdpo_math
import sdpo_mcq
import yaml
from conftest import make_model, make_tokenizer
from huggingface_hub import ModelCard, constants
from trl import ModelConfig, TrlParser

import sdpo
from sdpo import SDPOConfig, SDPOTrainer, rewards
from sdpo.metric_table import METRICS
from sdpo.presets import PresetName

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", ROOT / "examples/README.md", *ROOT.glob("docs/*.md")]
}
FIELDS = {f.name for f in fields(SDPOConfig)}
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
READERS_OWN = {"train.py"}  # scripts that a page asks the reader to write


class Snippet(NamedTuple):
    """A fenced block: the line its text starts at, its language, its text, and whether it is to be run."""

    line: int
    language: str
    text: str
    is_run: bool


def snippets(page: str) -> list[Snippet]:
    found: list[Snippet] = []
    lines = PAGES[page].splitlines()
    start: int | None = None
    for i, line in enumerate(lines):
        if line.startswith("```") and start is None:
            start = i
        elif line == "```" and start is not None:
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            text = "\n".join(lines[start + 1 : i])
            found.append(Snippet(start + 2, lines[start][3:].strip(), text, not NOT_RUN.fullmatch(before.strip())))
            start = None
    assert start is None, f"{page}: a block is not closed"
    return found


def python_of(page: str) -> list[Snippet]:
    return [snippet for snippet in snippets(page) if snippet.language == "python"]


def without_ellipsis(text: str) -> str:
    """The block without `...` as the last argument of a call, which stands for the reader's own settings."""
    return re.sub(r",\s*\.\.\.\s*\)", ")", text)


# --- Python ----------------------------------------------------------------------------------------------------------

WITH_PYTHON = sorted(page for page in PAGES if python_of(page))
MODEL_IDS = {
    name
    for page in WITH_PYTHON
    for snippet in python_of(page)
    for name in re.findall(r'(?:SDPOTrainer|from_pretrained)\(\s*(?:model=)?"([\w.-]+/[\w.-]+)"', snippet.text)
}


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub that has the tiny model under every id that a page loads."""
    cache, revision = tmp_path_factory.mktemp("hub"), "0" * 40
    tokenizer = make_tokenizer()
    for name in MODEL_IDS:
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(revision)
        make_model(tokenizer).save_pretrained(folder / "snapshots" / revision)
        tokenizer.save_pretrained(folder / "snapshots" / revision)
    return cache


def run_page(page: str) -> dict[str, Any]:
    """The namespace after the blocks of the page that run here; the others are compiled and their names looked up."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for snippet in python_of(page):
        text = without_ellipsis(snippet.text)
        if text != snippet.text:  # a fragment: its imports are the reader's too
            namespace |= {name: getattr(sdpo, name) for name in sdpo.__all__} | namespace
        # As many empty lines as the page has above the block, so that a traceback names the line of the page.
        code = compile("\n" * (snippet.line - 1) + text, page, "exec")
        if snippet.is_run:
            exec(code, namespace)
        else:
            check_names(page, snippet, namespace)
    return namespace


def check_names(page: str, snippet: Snippet, namespace: dict[str, Any]) -> None:
    """Names of the block come from somewhere, what it imports of sdpo is there, and settings are fields."""
    tree = ast.parse(without_ellipsis(snippet.text))
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "sdpo":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), f"{page}:{snippet.line}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("SDPOConfig"):
            unknown = {keyword.arg for keyword in node.keywords if keyword.arg} - FIELDS
            assert not unknown, f"{page}:{snippet.line} has settings that do not exist: {unknown}"
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used <= bound | namespace.keys() | set(dir(builtins)), f"{page}:{snippet.line}"


@pytest.mark.parametrize(
    "text",
    [
        "from sdpo import SDPOTrianer",
        "from sdpo import SDPOConfig\nSDPOConfig(use_vlm=True)",
        "def train():\n    return SDPOConfig()",
    ],
)
def test_a_block_that_is_not_run_is_refused_for_a_name_that_does_not_exist(text: str) -> None:
    check_names("page", Snippet(1, "python", "from sdpo import SDPOConfig\nSDPOConfig(use_vllm=True)", False), {})
    with pytest.raises(AssertionError):
        check_names("page", Snippet(1, "python", text, False), {})


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_of_a_page_runs(
    page: str, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.chdir(tmp_path)
    namespace = run_page(page)
    check = CHECKS.get(page)
    if check is not None:
        check(namespace, capsys.readouterr().out)


def check_quick_start(namespace: dict[str, Any], printed: str) -> None:
    assert namespace["trainer"].state.global_step == 20
    assert (Path("outputs/first") / "model.safetensors").exists()
    assert re.findall(r"^(\d+) \{'reward'", printed, re.MULTILINE) == ["10", "20"]
    assert "teacher, as in the run" in printed


def check_one_token_by_hand(namespace: dict[str, Any], printed: str) -> None:
    page = PAGES["docs/how_it_works.md"]
    values = {name: f"{value.item():.3f}" for name, value in namespace["values"].items()}
    assert values == {"reverse": "0.405", "forward": "0.373", "mixed": "0.093", "top 2": "0.450", "sampled": "0.405"}
    for first_cell, value in (
        ("| reverse KL: 0.6", "0.405"),
        ("| forward KL: 0.2", "0.373"),
        ("| Jensen-Shannon, a = 0.5", "0.093"),
        ("| reverse KL of the top 2", "0.450"),
        ("| sampled token: one of", "0.405 in expectation"),
    ):
        [row] = [line for line in page.splitlines() if line.startswith(first_cell)]
        assert row.endswith(f"| {value} |")
    slopes = " | ".join(f"{slope:+.3f}" for slope in namespace["slope"].tolist())
    assert f"student's logits | {slopes} |" in page
    credit = (namespace["teacher"].log() - namespace["student"].log()).tolist()
    assert "| credit log T - log S | -1.10 | +0.85 | 0 |" in page
    assert [round(value, 2) for value in credit] == [-1.1, 0.85, 0.0]


def check_callback(namespace: dict[str, Any], printed: str) -> None:
    written = Path("teacher_prompts.txt").read_text()
    assert [line for line in written.splitlines() if line.startswith("---")] == ["--- step 0", "--- step 1"]
    assert written.replace(" ", "").count("Bebrief.") == 2  # the feedback; the tiny tokenizer drops spaces


def check_foreign_name(namespace: dict[str, Any], printed: str) -> None:
    assert "no field `teacher_mode`: did you mean `teacher_model_kind`?" in printed


def check_card(namespace: dict[str, Any], printed: str) -> None:
    card = ModelCard.load("outputs/first/README.md")
    assert (card.data.base_model, card.data.license) == ("Qwen/Qwen3-0.6B", "apache-2.0")
    assert "2 optimizer steps of 8 completions" in card.text


CHECKS = {
    "docs/index.md": check_quick_start,
    "docs/how_it_works.md": check_one_token_by_hand,
    "docs/callbacks.md": check_callback,
    "docs/from_trl.md": check_foreign_name,
    "docs/hub.md": check_card,
}


def test_readme_and_quick_start_train_in_the_same_way() -> None:
    def statements(page: str) -> list[str]:
        return [ast.unparse(node) for node in ast.parse(python_of(page)[0].text).body]

    def keywords(page: str) -> set[str]:
        [call] = [n for n in ast.walk(ast.parse(python_of(page)[0].text)) if ast.unparse(n).startswith("SDPOConfig(")]
        return {ast.unparse(keyword) for keyword in call.keywords}

    first, second = (
        [text for text in statements(page) if not text.startswith("args = ")]
        for page in ("README.md", "docs/index.md")
    )
    assert first == second
    assert keywords("README.md") == keywords("docs/index.md")


# --- commands --------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\S*/)?(?:python3?|make|pip|accelerate|torchrun)\s")
RECIPES = {f"examples/{m.__name__}.py": m for m in (sdpo_code, sdpo_instructions, sdpo_math, sdpo_mcq)}


def flags_of(recipe: Any) -> set[str]:
    parser = TrlParser((recipe.ScriptArguments, SDPOConfig, ModelConfig))
    return {flag for flag in parser._option_string_actions if flag.startswith("--")}


class Command(NamedTuple):
    line: int
    words: list[str]
    is_whole: bool
    """Not a mention in the middle of a sentence, which may leave out what it is not about."""


def commands(page: str) -> Iterator[Command]:
    lines = PAGES[page].splitlines()
    fenced = {n for s in snippets(page) for n in range(s.line, s.line + s.text.count("\n") + 1)}
    shell = {
        n
        for s in snippets(page)
        if s.language in ("", "sh", "bash", "console")
        for n in range(s.line, s.line + s.text.count("\n") + 1)
    }
    number = 0
    while number < len(lines):
        number += 1
        text, start = lines[number - 1], number
        if number in fenced and number not in shell:
            continue
        if number in shell or text.startswith("    "):
            text = text.strip().removeprefix("$ ")
            while text.endswith("\\") and number < len(lines):
                text = text[:-1] + lines[number].strip()
                number += 1
            if COMMAND.match(text):
                yield Command(start, shlex.split(text, comments=True), True)
        else:
            for mention in re.findall(r"`([^`]+)`", text):
                if COMMAND.match(mention):
                    yield Command(start, [word for word in shlex.split(mention) if word != "..."], False)


EVERY_COMMAND = [(page, command) for page in sorted(PAGES) for command in commands(page)]


def test_commands_are_found() -> None:
    assert len([c for _, c in EVERY_COMMAND if c.is_whole]) >= 10


@pytest.mark.parametrize(
    ("page", "command"), EVERY_COMMAND, ids=[f"{page}:{command.line}" for page, command in EVERY_COMMAND]
)
def test_a_command_names_what_exists(page: str, command: Command) -> None:
    words = list(command.words)
    while "=" in words[0]:
        words.pop(0)
    program = words[0].rsplit("/", 1)[-1]
    if program == "make":
        check_make(command.words)
    elif program == "pip" or words[1:3] == ["-m", "pip"]:
        check_pip(words)
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    elif scripts := [word for word in words if word.endswith(".py")]:
        is_parsed = command.is_whole and program not in ("torchrun", "accelerate")  # a rank alone has no group
        check_script(scripts[0], words[words.index(scripts[0]) + 1 :], is_whole=is_parsed)
    else:
        assert not command.is_whole  # "accelerate launch" in the middle of a sentence


def check_script(script: str, arguments: list[str], *, is_whole: bool) -> None:
    if script in READERS_OWN:
        return
    source = (ROOT / script).read_text()
    flags = {word.split("=")[0] for word in arguments if word.startswith("--")}
    own = {"--help", *re.findall(r'"(--\w+)"', source)}
    own |= {f"--{name}" for name in re.findall(r"^    (\w+): .*field\(", source, re.MULTILINE)}  # of a dataclass
    recipe = RECIPES.get(script, sdpo_math if "sdpo_math" in source else None)
    forwarded = flags_of(recipe) if recipe is not None else set()
    assert flags <= own | forwarded, f"{script} has no {flags - own - forwarded}"
    if script in RECIPES and is_whole:
        RECIPES[script].parse(arguments)


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    for word in words:
        name, is_set, value = word.partition("=")
        if is_set:
            assert f"$({name})" in makefile or name == "OMP_NUM_THREADS"  # which torch reads
            if name == "BENCH_ARGS":
                check_script("tests/benchmarks/bench.py", shlex.split(value), is_whole=True)
        elif word != "make":
            assert word in targets


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if named := re.fullmatch(r"(?:\.|sdpo)\[([\w,]+)\]", word):
            assert set(named[1].split(",")) <= extras.keys()


# --- names, tables and links -----------------------------------------------------------------------------------------

METRIC_NAMES = [metric.name for section in METRICS for metric in section.metrics]
METRIC_FAMILIES = {name.split("/")[0] for name in METRIC_NAMES if "/" in name}
OF_TRL_ALONE = {"self_distillation/server_logprob_abs_diff"}


def parameters_of(value: object) -> list[str]:
    return list(inspect.signature(value).parameters) if callable(value) else []


ARGUMENTS = {
    *FIELDS,
    *inspect.signature(SDPOTrainer).parameters,
    *inspect.signature(sdpo.compare_teacher).parameters,
    *inspect.signature(SDPOTrainer.train).parameters,
    *(word for name in rewards.__all__ if name[0].isupper() for word in parameters_of(getattr(rewards, name))),
}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_settings_and_metrics_that_a_page_names_exist(page: str) -> None:
    mentions = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL))
    settings = {found[1] for text in mentions if (found := re.match(r"([a-z]\w*(?:_\w+)+)=", text))}
    assert settings <= ARGUMENTS | OTHERS_SETTINGS
    metrics = {text for text in mentions if re.fullmatch(r"(\w+)/[\w<>/]+", text)}
    metrics = {text for text in metrics if text.split("/")[0] in METRIC_FAMILIES and not (ROOT / text).exists()}
    assert {name.removeprefix("eval_") for name in metrics} <= {*METRIC_NAMES, *OF_TRL_ALONE}


OTHERS_SETTINGS = {"is_trainable"}  # of PeftModel.from_pretrained


def test_the_table_of_presets_holds_their_values() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \| (.+) \| .+ \|$", PAGES["docs/choosing_settings.md"], re.M
    )
    assert len(rows) > 15
    shape = {"output_dir": "unused", "per_device_train_batch_size": 8, "use_cpu": True}
    configs = [SDPOConfig(**shape)]
    configs += [SDPOConfig.preset(name, **shape) for name in ("no_feedback", "rich_feedback", "test_time")]
    assert len(configs) == 1 + len(PresetName.__args__)
    for name, *cells in rows:
        for config, cell in zip(configs, cells, strict=True):
            value = getattr(config, name)
            assert getattr(value, "value", value) == ast.literal_eval(cell), name


def slug(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert anchor in {slug(heading.replace("`", "")) for heading in headings}, f"{page}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from leaves(inner)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(leaves(nav)) == sorted(path.name for path in ROOT.glob("docs/*.md"))


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == generate_metrics_docs.render(), "run scripts/generate_metrics_docs.py"
