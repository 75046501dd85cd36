"""The report of fuse_: lists, a table, a picture."""

import doctest
import linecache
import sys

import pytest
import torch.nn.functional as F
from processes import python
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear._support.picture import spans


def block(activation=nn.ReLU):
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 4))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.both, self.act = nn.Linear(4, 16, bias=False), nn.SiLU()

    def forward(self, x):
        h = self.w2(self.act(self.w1(x)) * self.w3(x))
        gate, up = self.both(x).chunk(2, -1)
        return h + (F.gelu(gate, approximate="tanh") * up).sum()


def model():
    return nn.ModuleDict(
        {
            "tower": nn.ModuleList(block() for _ in range(3)),
            "erf": block(nn.GELU),
            "dropped": nn.Sequential(
                nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 4)
            ),
            "mish": block(nn.Mish),
        }
    )


def test_the_lists():
    report = tfl.fuse_(model())
    assert [b.path for b in report.fused] == ["tower.0", "tower.1", "tower.2", "erf", "dropped"]
    assert report.fused[1].layers == ("tower.1.0", "tower.1.2")
    assert report.fused[3].kind == "Sequential"
    assert report.fused[3].before == ("MatMul", "BiasAdd", "GELU (erf)", "MatMul", "BiasAdd")
    assert report.fused[3].after == ("mlp (GELU (erf))",)
    assert report.fused[4].before == ("MatMul", "ReLU", "Dropout", "MatMul", "BiasAdd")
    assert report.fused[4].after == ("linear_relu", "Dropout", "linear")
    assert [s.path for s in report.skipped] == ["mish.0"]


def test_the_table_counts_what_is_alike():
    lines = str(tfl.fuse_(model())).splitlines()
    assert lines[0] == "5 blocks fused, 1 place left alone"
    (tower,) = [line for line in lines if "tower" in line]
    assert tower.split()[:4] == ["3", "×", "tower.*.0", "Sequential"]
    assert tower.endswith("MatMul → BiasAdd → ReLU → MatMul → BiasAdd  ⇒  mlp (ReLU)")
    assert lines[-1].startswith("1 ×  mish.0  ") and "only ReLU, squared" in lines[-1]
    assert str(tfl.fuse_(nn.Linear(2, 2))) == "0 blocks fused, 0 places left alone"
    assert str(tfl.fuse_(block())).startswith("1 block fused, 0 places")


def test_the_docstrings_lines_run():
    module, flags = sys.modules["torch_fused_linear.fuse"], doctest.ELLIPSIS
    assert doctest.testmod(module, extraglobs={"nn": nn}, optionflags=flags) == (0, 11)


def test_the_picture_has_every_kind_of_block_once(tmp_path):
    pytest.importorskip("matplotlib", reason="draws the picture")
    report = tfl.fuse_(model())
    assert len({(block.before, block.after) for block in report.fused}) == 3
    report.save_picture(tmp_path / "ops.svg")
    text = (tmp_path / "ops.svg").read_text()
    assert "3 × Sequential" in text and text.count("1 × Sequential") == 2
    words = {">MatMul<": 6, ">GELU (erf)<": 1, ">Dropout<": 2, ">linear_relu<": 1, ">linear<": 1}
    words |= {">mlp (ReLU)<": 1, ">mlp (GELU (erf))<": 1}
    assert {word: text.count(word) for word in words} == words
    report.save_picture(str(tmp_path / "ops.png"))
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")
    tfl.fuse_(nn.Linear(2, 2)).save_picture(tmp_path / "none.svg")
    assert "nothing was fused" in (tmp_path / "none.svg").read_text()


def test_gated_layers():
    report = tfl.fuse_(Gated(), memory="low")
    assert report == tfl.fuse_(Gated(), dry_run=True)
    first, second = report.fused
    assert first.layers == ("w1", "w3", "w2") and second.layers == ("both",)
    parts = ["MatMul", "BiasAdd", "SiLU", "MatMul", "BiasAdd", "Mul", "MatMul", "BiasAdd"]
    assert first.before == tuple(parts) and first.after == ("gated_mlp (SiLU)",)
    assert second.before == ("MatMul", "Chunk", "GELU (tanh)", "Mul")
    assert second.after == ("linear_glu (GELU (tanh))",)
    file, _, line = first.place.rpartition(":")
    assert "h = self.w2(self.act(self.w1" in linecache.getline(file, int(line))


def test_a_fused_box_stands_under_what_it_took_in():
    ops = ("MatMul", "BiasAdd", "ReLU", "MatMul", "BiasAdd")
    assert spans(ops, ("linear_relu", "linear")) == [(0, 3), (3, 2)]
    assert spans(ops, ("mlp (ReLU)",)) == [(0, 5)]
    assert spans(ops * 2, ("mlp (ReLU)",) * 2) == [(0, 5), (5, 5)]
    assert spans((*ops, "ReLU", "MatMul"), ("mlp (ReLU) × 3",)) == [(0, 7)]
    assert spans((*ops[:3], *ops), ("linear_relu", "mlp (ReLU)")) == [(0, 3), (3, 5)]
    ops = ("MatMul", "BiasAdd", "Dropout", "ReLU", "Dropout", "MatMul")
    after = ("linear_relu", "Dropout", "Dropout", "linear")
    assert spans(ops, after) == [(0, 3), (3, 1), (4, 1), (5, 1)]
    ops = ("MatMul", "SiLU", "MatMul", "Mul", "MatMul", "BiasAdd")
    assert spans(ops, ("gated_mlp (SiLU)",)) == [(0, 6)]
    assert spans(ops, ("linear_glu (SiLU)", "linear")) == [(0, 4), (4, 2)]
    assert spans(ops * 2, ("gated_mlp (SiLU)",) * 2) == [(0, 6), (6, 6)]
    ops = ("MatMul", "Chunk", "SiLU", "Mul", "Dropout", "MatMul")
    assert spans(ops, ("linear_glu (SiLU)", "Dropout", "linear")) == [(0, 4), (4, 1), (5, 1)]


def test_without_matplotlib_the_picture_says_what_is_missing(tmp_path, monkeypatch):
    report = tfl.fuse_(block())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="expected matplotlib"):
        report.save_picture(tmp_path / "ops.png")
    assert str(report)


def test_neither_libraries_nor_matplotlib_are_imported():
    code = (
        "import sys, torch_fused_linear as tfl\n"
        "from torch import nn\n"
        "tfl.fuse_(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))\n"
        "print({'matplotlib', 'timm', 'torchvision', 'transformers', 'torch._dynamo'}"
        " & set(sys.modules))"
    )
    assert python("-c", code).stdout.strip() == "set()"
