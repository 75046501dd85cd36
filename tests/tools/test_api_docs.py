"""The reference is whole: every public name is in it and says what it takes, gives and refuses.

test_docs.py runs what the pages say; here they are held to the code that they describe: a reason
that a user may be shown and cannot look up, or a number older than the results, is a failure.
"""

import ast
import doctest
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from processes import ROOT, python

import torch_fused_linear as tfl
from torch_fused_linear.fuse import families

DOCS = ROOT / "docs"


# --- docstrings -------------------------------------------------------------------------------


PROTOCOL = ("forward", "extra_repr")  # what torch calls, as it says itself


def public() -> dict[str, object]:
    """Everything that is reached from __all__ by public names: functions, classes, methods."""
    found = {name: getattr(tfl, name) for name in tfl.__all__}
    for name, module in list(found.items()):
        if isinstance(module, ModuleType):
            found |= {
                f"{name}.{key}": value
                for key, value in vars(module).items()
                if key in getattr(module, "__all__", vars(module))
                and not key.startswith("_")
                and getattr(value, "__module__", "").startswith("torch_fused_linear")
                and callable(value)
            }
    for name, cls in list(found.items()):
        if isinstance(cls, type):
            for key, value in vars(cls).items():
                if not key.startswith("_") and key not in PROTOCOL:
                    value = getattr(value, "__func__", value)  # of a class method
                    if inspect.isfunction(value) or isinstance(value, property):
                        found[f"{name}.{key}"] = value
    return found


PUBLIC = public()


def section(docstring: str, title: str) -> str:
    match = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    return match[1] if match else ""


def parameters(value) -> list[str]:
    if isinstance(value, (ModuleType, property)):
        return []
    function = value.__init__ if isinstance(value, type) else value
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def raised(value) -> set[str]:
    """Names of the exceptions that the code itself raises."""
    if isinstance(value, ModuleType):
        return set()
    functions = [value.fget if isinstance(value, property) else value]
    if isinstance(value, type):  # what is raised by being made and called
        functions = [vars(value)[key] for key in ("__init__", "forward") if key in vars(value)]
    found = set()
    for function in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add(ast.unparse(node.exc.func))
    return found


def test_the_names_are_found():
    """An empty list of parameters would pass."""
    expected = {"linear", "FusedMLP", "FusedMLP.from_sequential", "plans.save", "plans.budget"}
    assert expected <= set(PUBLIC) and len(PUBLIC) > 25


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    value = PUBLIC[name]
    docstring = inspect.cleandoc(value.__doc__ or "")
    if isinstance(value, property) and not docstring:
        owner = inspect.cleandoc(PUBLIC[name.rpartition(".")[0]].__doc__)
        docstring = section(owner, "Attributes").partition(f"{name.rpartition('.')[2]}:")[2]
    assert len(docstring.split()) >= 3, "no docstring"

    names = parameters(value)
    arguments = section(docstring, "Args")
    documented = re.findall(r"^    (\w[\w, ]*): \S", arguments, re.MULTILINE)
    assert ", ".join(documented) == ", ".join(names)

    if names and inspect.isfunction(value):
        gives = inspect.signature(value).return_annotation
        if gives not in (None, "None", inspect.Signature.empty):
            assert section(docstring, "Returns").strip(), "no Returns"
    for exception in raised(value):
        assert exception in section(docstring, "Raises"), f"Raises says nothing of {exception}"


# A docstring or comment begins with its subject or its verb.
FIRST_WORDS = ("Of ", "What ", "Whether ", "Whoever ", "Nor ", "The same ", "In place of")
FOLDERS = ("torch_fused_linear", "csrc", "tests", "benchmarks", "examples", "build_tools")
MARKS = {".py": "#", **dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), "//")}


def docstrings_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""


def comments_of(path):
    """The comments that have lines of their own, without the lines that continue another's."""
    mark, before = MARKS[path.suffix], False
    for line in path.read_text().splitlines():
        text = line.strip()
        if text.startswith(mark) and not before:
            yield text.removeprefix(mark).strip()
        before = text.startswith(mark)


def awkward(paths):
    """The docstrings and comments that begin with another word."""
    for path in paths:
        docstrings = docstrings_of(path) if path.suffix == ".py" else ()
        for text in (*docstrings, *comments_of(path)):
            if text.startswith(FIRST_WORDS):
                yield f"{path.name}: {text.splitlines()[0]}"


def test_docstrings_and_comments_begin_with_subject_or_verb():
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in MARKS]
    # A user's docstring that a test holds fuse_ to.
    files = [p for p in files if "include" not in p.parts and p.name != "test_fuse_looks.py"]
    assert [*awkward(files)] == [] and len(files) > 400


def test_awkward_first_words_are_found(tmp_path):
    for name, text in {
        "a.py": 'x = 1\n"""a"""\n# Of two.\n',
        "b.h": "// So.\n\n// What b is.\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert [*awkward(sorted(tmp_path.iterdir()))] == ["a.py: Of two.", "b.h: What b is."]


# By the comment in an example's first line: whether this machine has what it needs.
NEEDS = {
    "a GPU": torch.cuda.is_available(),
    "onnxscript": importlib.util.find_spec("onnxscript") is not None,
    "several processes": False,
}
NO_EXAMPLE = (ModuleType, property)


def examples_of(name):
    docstring = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    return doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if not isinstance(v, NO_EXAMPLE)])
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = examples_of(name)
    assert test.examples, f"{name} has no example"
    needs = re.search(r">>> # needs (.*)", test.docstring)
    if needs and not NEEDS[needs[1]]:
        pytest.skip(f"needs {needs[1]}")
    test.globs = {name: getattr(tfl, name) for name in tfl.__all__}
    test.globs |= {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    said = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert not said, "".join(said)


# --- pages that follow the code ---------------------------------------------------------------


def found(pattern: str, *globs: str) -> list[str]:
    """The matches of the pattern's group in files of csrc."""
    paths = sorted(path for glob in globs for path in (ROOT / "csrc").glob(glob))
    text = "\n".join(path.read_text() for path in paths)
    return re.findall(pattern, text, re.DOTALL | re.MULTILINE)


def literals(pieces: list[str]) -> list[str]:
    return re.findall(r'"([^"]+)"', "\n".join(pieces))


# `return "it";`, `{std::nullopt, "it"}`, `return ... ? "it" : nullptr;` and the other way round
RETURNED = r'(?:return|return [^;]*? \?|nullptr :|nullptr,|nullopt,) "([^"]+)"(?:;|}| : nullptr;)'
OBJECTIONS = r"^inline const char\* objection\(.*?^}"
TRIALS = "no valid algorithm|its trial|less exact|unknown while"
REASONS = {
    "no kernel": found(
        r'"(\(no kernel: [^"]+\))"', "core/*.h", "../torch_fused_linear/_torch/*.py"
    ),
    "cuDNN": found(r'"(\(not cuDNN\'s fused form: [^"]+\))"', "conv/cuda/*"),
    "GEMM": literals(found(OBJECTIONS, *(f"gemm/{n}.h" for n in ("choice", "hopper", "problem")))),
    "trials": found(rf'"(\(no GELU epilogue[^"]+|(?:{TRIALS})[^"]+)"', "cuda/tune/decide.cpp"),
    "accumulation": [
        *found(RETURNED, "autograd/accumulation.cpp"),
        *found(r'why = "([^"]+)"', "autograd/accumulation.cpp"),
    ],
    "steps": [
        *literals(found(r"explain::append\((.*?)\);", "**/*.cpp")),
        *found(r'return "(ATen \w+)";', "**/*.cpp"),
        *found(r'not_fused = "(.+)";', "core/explain.h"),
    ],
}


def fuse_reasons(path: Path) -> list[str]:
    """The reasons that a function of fuse/ returns: its strings, or the longest piece of one."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not re.search(
            "objection|reason|misuse|explain_the_rest|added_behaviour", function.name
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr):
                pieces = [v.value for v in node.values if isinstance(v, ast.Constant)]
                found.append(max(pieces, key=len, default=""))
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                found.append(node.value.value)
    return [text.strip(" ;:") for text in found if isinstance(text, str) and len(text) > 9]


REASONS["fuse"] = [*families.REFUSALS.values()]
PACKAGE = ROOT / "torch_fused_linear"
for path in (*(PACKAGE / "fuse").glob("*.py"), PACKAGE / "_support" / "torch_internals.py"):
    REASONS["fuse"] += fuse_reasons(path)


def test_the_reasons_are_found():
    """One for each way in which the code says them."""
    expected = {"create_graph", "a hook on the weight", "another stream", "used more than once"}
    expected |= {"no such epilogue", "one row or column"}
    expected |= {"(no kernel: layout)", "(no kernel: tensor subclass)", "has a parametrisation"}
    expected |= {"(not cuDNN's fused form: less exact than eager)", "its trial failed"}
    expected |= {"own one-pass kernel", "ATen mm", "PyTorch's own (not fused)"}
    assert expected <= set().union(*REASONS.values())
    assert sum(map(len, REASONS.values())) > 100


@pytest.mark.parametrize("source", REASONS)
def test_every_reason_is_explained(source):
    name = "accumulation.md" if source == "accumulation" else "fallbacks.md"
    page = " ".join((DOCS / name).read_text().split())
    missing = {reason for reason in REASONS[source] if reason not in page}
    assert not missing, f"docs/{name} does not say what these mean: {missing}"


def test_performance_pages_have_no_numbers_of_its_own():
    """Speeds and times stand in the tables, which are made; sizes are no results."""
    for name in ("performance.md", "measurements.md", "memory.md", "cpu.md"):
        page = (DOCS / name).read_text()
        marks = r"<!-- results[^>]*: begin -->.*?: end -->"
        prose = re.sub(marks + r"|torch \d\.\d+", "", page, flags=re.DOTALL)
        assert not re.findall(r"\d\.\d|\d ?[µm]s\b|\d ?%|×", prose), name


# --- building ---------------------------------------------------------------------------------


def test_readme_names_every_operator():
    names = torch._C._dispatch_get_all_op_names()
    operators = [n[len("fused::") :] for n in names if re.match(r"fused::[a-z]\w*$", n)]
    assert len(operators) >= 5
    text = (ROOT / "README.md").read_text()
    named = re.search(r"The operators are `torch\.ops\.fused(.*?`)\.\n", text, re.DOTALL)
    assert set(re.findall(r"\.(\w+)`", named[1])) == set(operators)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages, built with warnings as errors; own names that lead nowhere are warnings."""
    absent = [n for n in ("sphinx", "furo", "myst_parser") if importlib.util.find_spec(n) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}: pip install -r requirements-docs.txt")
    folder = tmp_path_factory.mktemp("docs")
    python("-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", folder)
    return folder


def test_built_pages_have_every_name(built):
    anchors = re.findall(r'\bid="([^"]+)"', (built / "docs" / "api.html").read_text())
    for name, value in PUBLIC.items():
        prefix = "module-" if isinstance(value, ModuleType) else ""
        assert f"{prefix}torch_fused_linear.{name}" in anchors, name


def test_built_pages_need_no_network(built):
    """Formulas are MathML; no script, style or picture comes from elsewhere."""
    fetched = r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)"
    for path in built.rglob("*.html"):
        assert not re.findall(fetched, path.read_text()), path.name
    assert "<math" in (built / "docs" / "api.html").read_text()
