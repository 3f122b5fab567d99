"""The shape of the package, as docs/design.md says it: who may import whom, and the one home of some operations."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sdpo"
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}

# From the bottom up. A unit is a module or a folder of sdpo/; it imports units of lower layers, and itself.
LAYERS = (
    {"types", "templates", "config_rules", "sampling_rules", "presets", "metric_table"},
    {"config"},
    {"losses", "demonstrations", "reprompt", "metrics", "model_card", "health"},
    {
        "data",
        "tokenization",
        "generation",
        "rewards",
        "collate",
        "heads",
        "chunk",
        "token_values",
        "forward",
        "teacher",
        "distributed",
        "loading",
        "served_teacher",
        "sharding",
        "token_texts",
        "completion_log",
    },
    {"callbacks", "sources", "log_callback", "hub", "progress"},
    {"blocks", "checkpoint", "guard"},
    {"trainer"},
    {"teacher_check", "report", "doctor", "discovery"},
)
SAME_LAYER = {
    ("config_rules", "types"),  # choices
    ("config_rules", "templates"),  # they are parsed at construction
    ("sampling_rules", "config_rules"),  # ranges, and what a rule is made of
    ("presets", "config_rules"),  # names of presets are a choice
    ("generation", "distributed"),  # one server for all ranks
    ("reprompt", "demonstrations"),  # what there is to show, and how it is shown
    ("served_teacher", "collate"),  # its grid
    ("generation", "sharding"),  # a policy that is cut up is made whole to generate
    ("teacher", "sharding"),
    ("distributed", "sharding"),  # errors that cannot be told to other ranks
    ("forward", "distributed"),  # a model is tried on one rank
    ("forward", "sharding"),  # the head that the loss is computed through
    ("generation", "collate"),  # prompts are padded for the sampler, and padding has one home
    ("forward", "collate"),  # the layout it tries the model on
    ("forward", "heads"),
    ("forward", "token_values"),
    ("forward", "chunk"),
    ("token_values", "chunk"),
    ("token_values", "heads"),
    ("chunk", "heads"),
    ("guard", "checkpoint"),  # what it saves
}
CONFIG = {"sdpo.config", "sdpo.config_rules", "sdpo.sampling_rules", "sdpo.presets"}
# What a unit must not import although its layer would allow it.
FORBIDDEN = {
    "types": {"transformers"},
    "templates": {"transformers", "accelerate", "torch"},
    "metric_table": {"transformers", "accelerate", "torch"},
    "losses": {*CONFIG, "transformers", "accelerate", "logging"},
    "demonstrations": {*CONFIG, "transformers", "accelerate", "torch"},
    "reprompt": {*CONFIG, "transformers", "accelerate", "torch"},
    "metrics": {*CONFIG, "transformers", "accelerate"},
    "model_card": {"torch", "transformers", "accelerate"},
    "health": {*CONFIG, "torch", "transformers", "accelerate"},
    "completion_log": {*CONFIG, "torch", "transformers", "accelerate"},
    "report": {"torch", "transformers", "accelerate"},  # a report is made anywhere, from the files alone
}
VLLM_HOME, COLLECTIVE_HOME, PADDING_HOME = "generation/vllm.py", "distributed.py", "collate.py"
SHARDING_HOME = "sharding.py"  # parameters come together by the frameworks' own calls, from here
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce_scatter", "gather_object"),
    *("broadcast_object_list", "gather_for_metrics", "pad_across_processes", "wait_for_everyone"),
}
ACCELERATOR_COLLECTIVES = {"gather", "reduce"}  # of an accelerator; a tensor has methods of these names too
PADDING = {"pad_sequence", "pad"}
MAX_FUNCTION_LINES, MAX_MODULE_LINES = 60, 400
LONG_MODULES = {"config.py", "config_rules.py"}  # a field and a rule are a line of code and several of text
LAZY = ("torch", "transformers", "vllm", "peft", "deepspeed")


def imports(name: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module imports, also inside functions."""
    package = ("sdpo", *name.split("/")[:-1])
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["__version__"]:
            continue  # of the package itself, which loads nothing
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def is_within(name: str, packages: set[str]) -> bool:
    """Whether a dotted name is one of the packages or inside one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def unit_of(name: str) -> str:
    """Unit of a module, from its path or from its dotted name after "sdpo."."""
    return name.removesuffix(".py").replace("/", ".").split(".")[0]


def allowed_units(unit: str) -> set[str]:
    """Units that a unit may import."""
    depth = next(i for i, layer in enumerate(LAYERS) if unit in layer)
    return set().union(*LAYERS[:depth], {unit}, {other for user, other in SAME_LAYER if user == unit})


def called(node: ast.AST) -> tuple[str, str]:
    """(receiver, name) of the attribute or name that a node is, as in ("self.accelerator", "gather")."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    return "", node.id if isinstance(node, ast.Name) else ""


def inner_modules() -> list[str]:
    return sorted(name for name in MODULES if name != "__init__.py")


def test_every_module_has_a_place_in_the_layers():
    assert {unit_of(name) for name in inner_modules()} <= set().union(*LAYERS)


@pytest.mark.parametrize("name", inner_modules())
def test_imports_go_down(name):
    unit = unit_of(name)
    wrong = [
        f"{name}:{line} imports {target}"
        for line, target in imports(name)
        if (is_within(target, {"sdpo"}) and unit_of(target.removeprefix("sdpo.")) not in allowed_units(unit))
        or is_within(target, FORBIDDEN.get(unit, set()))
    ]
    assert not wrong


def test_only_one_module_imports_vllm():
    assert not [n for n in MODULES if n != VLLM_HOME for _, target in imports(n) if is_within(target, {"vllm"})]


def test_only_one_module_issues_collectives():
    wrong = []
    for name in sorted(MODULES.keys() - {COLLECTIVE_HOME}):
        if name == SHARDING_HOME:
            continue
        wrong += [(name, line) for line, target in imports(name) if is_within(target, {"torch.distributed"})]
        for node in ast.walk(MODULES[name]):
            receiver, attribute = called(node)
            is_accelerator = receiver.split(".")[-1] == "accelerator" and attribute in ACCELERATOR_COLLECTIVES
            is_torch = receiver.startswith("torch.distributed") or (receiver, attribute) == ("torch", "distributed")
            if attribute in COLLECTIVES or is_accelerator or is_torch:
                wrong.append((name, node.lineno))
    assert not wrong


def test_only_one_module_pads():
    wrong = []
    for name in sorted(MODULES.keys() - {PADDING_HOME}):
        borrows = "sdpo.collate.pad" in {target for _, target in imports(name)}
        for node in ast.walk(MODULES[name]):
            if isinstance(node, ast.Call) and not (borrows and called(node.func) == ("", "pad")):
                is_asked = any(k.arg == "padding" and ast.unparse(k.value) != "False" for k in node.keywords)
                if called(node.func)[1] in PADDING or is_asked:
                    wrong.append((name, node.lineno))
    assert not wrong


@pytest.mark.parametrize("name", sorted(MODULES))
def test_code_fits_on_a_screen(name):
    functions = (n for n in ast.walk(MODULES[name]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    assert not [f"{name}:{f.lineno} {f.name}" for f in functions if f.end_lineno - f.lineno >= MAX_FUNCTION_LINES]
    lines = len((PACKAGE / name).read_text().splitlines())
    assert name in LONG_MODULES or lines <= MAX_MODULE_LINES


def test_import_is_light():
    program = f"import sdpo, sys; print(*(m for m in {LAZY!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (result.stdout.split(), result.stderr) == ([], "")
