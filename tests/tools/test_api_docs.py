"""The reference is whole: every public name is in it and says what it takes, gives and refuses.

test_docs.py runs what the pages say; here they are held to the code that they describe: a reason
that a user may be shown and cannot look up, or a number older than the results, is a failure.
"""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import torch

import torch_fused_linear as tfl
from torch_fused_linear.fuse import families

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "api.rst").read_text()


# --- docstrings -------------------------------------------------------------------------------


PROTOCOL = ("forward", "extra_repr")  # what torch calls, as it says itself


def is_ours(value) -> bool:
    return getattr(value, "__module__", "").startswith("torch_fused_linear")


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
                and is_ours(value)
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
public_param = pytest.mark.parametrize("name", PUBLIC)


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


@public_param
def test_docstring(name):
    value = PUBLIC[name]
    docstring = inspect.cleandoc(value.__doc__ or "")
    if isinstance(value, property) and not docstring:
        owner = inspect.cleandoc(PUBLIC[name.rpartition(".")[0]].__doc__)
        docstring = section(owner, "Attributes").partition(f"{name.rpartition('.')[2]}:")[2]
    assert len(docstring.split()) >= 3, "no docstring"

    names = parameters(value)
    arguments = section(docstring, "Args")
    documented = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert documented == names

    if names and inspect.isfunction(value):
        gives = inspect.signature(value).return_annotation
        if gives not in (None, "None", inspect.Signature.empty):
            assert section(docstring, "Returns").strip(), "no Returns"
    for exception in raised(value):
        assert exception in section(docstring, "Raises"), f"Raises says nothing of {exception}"


@pytest.mark.parametrize("name", tfl.__all__)
def test_name_is_in_the_reference(name):
    kind = "module" if isinstance(PUBLIC[name], ModuleType) else r"(?:function|class)"
    entry = rf"^\.\. auto{kind}:: (?:torch_fused_linear\.)?{name}$"
    assert len(re.findall(entry, REFERENCE, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", [n for n in tfl.__all__ if isinstance(PUBLIC[n], type)])
def test_methods_are_in_the_reference(name):
    entry = re.search(rf"^\.\. autoclass:: {name}\n((?:   .*\n)*)", REFERENCE, re.MULTILINE)
    members = re.search(r":members:(.*)", entry[1])
    listed = members[1].replace(",", " ").split() if members else []
    attributes = section(inspect.cleandoc(PUBLIC[name].__doc__), "Attributes")
    for method in (n for n in PUBLIC if n.startswith(f"{name}.")):
        key = method.partition(".")[2]
        everything = members and not listed
        assert everything or key in listed or re.search(rf"^    {key}:", attributes, re.M), key


# --- pages that follow the code ---------------------------------------------------------------


def strings(source: str, function: str | None = None) -> list[str]:
    """The string literals that C++ returns as reasons, of the whole file or of one function."""
    text = (ROOT / source).read_text()
    if function:
        start = re.search(rf"^inline const char\* {function}\(.*?^}}", text, re.DOTALL | re.M)
        text = start[0]
    found = re.findall(r'return "([^"]+)";', text)
    found += re.findall(r'(?:nullptr|nullopt), "([^"]+)"\}', text)
    found += re.findall(r'return [^;]*? \? "([^"]+)" : nullptr;', text)
    found += re.findall(r'return [^;]*? \? nullptr : "([^"]+)";', text)
    return found


REASONS = {
    "csrc/gemm/choice.h": strings("csrc/gemm/choice.h", "objection"),
    "csrc/gemm/problem.h": strings("csrc/gemm/problem.h", "objection"),
    "csrc/core/check.h": re.findall(
        r'"(\(no kernel: [^"]+\))"',
        "".join(
            (ROOT / p).read_text()
            for p in ("csrc/core/check.h", "torch_fused_linear/subclasses.py")
        ),
    ),
    "csrc/autograd/handover.cpp": strings("csrc/autograd/handover.cpp"),
    "csrc/autograd/linear_node.cpp": strings("csrc/autograd/linear_node.cpp"),
    "csrc/autograd/gated_node.cpp": strings("csrc/autograd/gated_node.cpp"),
    "csrc/cuda": re.findall(
        r'"(\(not cuDNN\'s fused form: [^"]+\))"',
        "".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*conv*"))),
    ),
    "csrc/cuda/tune/decide.cpp": re.findall(
        r'"(\(no GELU epilogue[^"]+|no valid algorithm[^"]+|unknown while[^"]+|its trial[^"]+|less'
        r' exact[^"]+)"',
        (ROOT / "csrc/cuda/tune/decide.cpp").read_text(),
    ),
}
# What any file of csrc adds to a row of explain.
STEPS = []
for path in sorted((ROOT / "csrc").rglob("*.cpp")):
    text = path.read_text()
    steps = " ".join(re.findall(r"explain::append\((.*?)\);", text, re.DOTALL))
    STEPS += re.findall(r'"([^"]+)"', steps) + re.findall(r'return "(ATen \w+)";', text)
STEPS += re.findall(r'not_fused = "(.+)";', (ROOT / "csrc/core/explain.h").read_text())
REASONS["csrc"] = sorted(set(STEPS))


def fuse_reasons(path: Path) -> list[str]:
    """What a function of fuse/ gives as a reason: its strings, or the longest piece of one."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not re.search(
            "objection|reason|misuse|explain_the_rest", function.name
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr):
                pieces = [v.value for v in node.values if isinstance(v, ast.Constant)]
                found.append(max(pieces, key=len, default=""))
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                found.append(node.value.value)
    return [text.strip(" ;:") for text in found if isinstance(text, str) and len(text) > 9]


for path in sorted((ROOT / "torch_fused_linear" / "fuse").glob("*.py")):
    if found := fuse_reasons(path):
        REASONS[f"fuse/{path.name}"] = found
REASONS["fuse/families.py"] = list(families.REFUSALS.values())


def test_the_reasons_are_found():
    assert "retain_grad" in REASONS["csrc/autograd/handover.cpp"]
    assert "no such epilogue" in REASONS["csrc/gemm/choice.h"]
    assert "one row or column" in REASONS["csrc/gemm/problem.h"]
    assert "(no kernel: layout)" in REASONS["csrc/core/check.h"]
    assert "no activation before" in REASONS["csrc/autograd/linear_node.cpp"]
    assert "its gate is frozen" in REASONS["csrc/autograd/gated_node.cpp"]
    assert {"own one-pass kernel", "PyTorch's own (not fused)"} <= set(REASONS["csrc"])
    assert "(no kernel: tensor subclass)" in REASONS["csrc/core/check.h"]
    assert "(not cuDNN's fused form: less exact than eager)" in REASONS["csrc/cuda"]
    assert "has a parametrisation" in REASONS["fuse/plain.py"]
    assert sum(map(len, REASONS.values())) > 60


@pytest.mark.parametrize("source", REASONS)
def test_every_reason_is_explained(source):
    page = " ".join((DOCS / "fallbacks.md").read_text().split())
    missing = [reason for reason in REASONS[source] if reason not in page]
    assert not missing, f"docs/fallbacks.md does not say what these mean: {missing}"


def test_performance_pages_have_no_numbers_of_its_own():
    """Speeds and times stand in the tables, which are made; sizes are no results."""
    for name in ("performance.md", "measurements.md", "memory.md", "cpu.md"):
        page = (DOCS / name).read_text()
        marks = r"<!-- results[^>]*: begin -->.*?: end -->"
        prose = re.sub(marks, "", page, flags=re.DOTALL)
        assert not re.findall(r"\d\.\d|\d ?[µm]s\b|\d ?%|×", prose), name


# --- building ---------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for key, value in attributes:
            if key == "id":
                self.anchors.add(value)
            elif (tag, key) in {("a", "href"), ("img", "src")} and value:
                self.links.append(value)


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
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    process = subprocess.run(
        [*command, ".", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def test_docs_build_without_warnings(built):
    assert (built / "docs" / "api.html").stat().st_size > 10000


def test_built_pages_have_every_name(built):
    anchors = Page(built / "docs" / "api.html").anchors
    for name, value in PUBLIC.items():
        prefix = "module-" if isinstance(value, ModuleType) else ""
        assert f"{prefix}torch_fused_linear.{name}" in anchors, name


def test_built_pages_need_no_network(built):
    """Formulas are MathML; no script, style or picture comes from elsewhere."""
    for path in built.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)", path.read_text()
        )
        assert not fetched, path.name
    assert "<math" in (built / "docs" / "api.html").read_text()


def pieces(cell: str) -> list[str]:
    """What a line cannot end in; code in a cell breaks anywhere."""
    text = re.sub(r"<code.*?</code>", "", cell, flags=re.DOTALL)
    return re.sub(r"<(?!wbr).*?>", "", text).replace("<wbr>", " ").split()


def test_tables_fit_on_a_phone(built):
    """What cannot break, of all columns together, has less than 60 letters, and code breaks."""
    styles = (built / "_static" / "pages.css").read_text()
    assert styles.count("white-space: pre-wrap") == 2, "on a phone, and on paper"
    count = 0
    for page in built.rglob("*.html"):
        text = page.read_text()
        for table in re.findall(r"<table class=.docutils.*?</table>", text, re.DOTALL):
            rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
            cells = [re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in rows]
            columns = zip(*(row for row in cells if len(row) == len(cells[0])))
            words = [[p for cell in column for p in pieces(cell)] for column in columns]
            widest = [max(map(len, column), default=0) for column in words]
            assert sum(widest) < 60, f"{page.name}: {widest}"
            assert "pages.css" in text
            count += 1
    assert count > 30
    assert "4096→<wbr>16384" in (built / "docs" / "measurements.html").read_text()


def test_no_page_is_twice_in_the_navigation(built):
    page = (built / "docs" / "api.html").read_text()
    tree = page.partition('<div class="sidebar-tree">')[2].partition("</aside>")[0]
    links = re.findall(r'<a class="reference [^"]*" href="([^"]*)"', tree)
    assert len(links) == len(set(links)) > 15


def test_the_front_page_is_found_from_the_folder(built):
    leads = re.search(r"url=([^\"]+)", (built / "index.html").read_text())
    assert (built / leads[1]).exists()


def test_built_pages_have_no_broken_links(built):
    pages = {path.resolve(): Page(path) for path in built.rglob("*.html")}
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(built)}: {link}"
            if parts.fragment and target in pages:
                known = pages[target].anchors
                assert unquote(parts.fragment) in known, f"{path.relative_to(built)}: {link}"
            followed += 1
    assert followed > 200


def test_every_page_is_in_the_table_of_contents(built):
    navigation = (built / "docs" / "index.html").read_text()
    navigation = re.search(r'<div class="sidebar-tree">(.*?)</div>', navigation, re.DOTALL)[1]
    links = re.findall(r'href="([^"#]+)"', navigation)
    for page in [*DOCS.glob("*.md"), DOCS / "api.rst"]:
        assert links.count(f"{page.stem}.html") == 1, page.name
    assert len(links) == len(set(links))
