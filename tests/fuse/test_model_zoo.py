"""fuse_ on a sample of the models that `make test-models` runs, and the record of that run."""

import json
from pathlib import Path

import pytest
import zoo_check
from model_zoo import wrong

RECORD = Path(__file__).with_name("model_zoo.json")
# name: at least so many blocks
SAMPLE = {
    "timm/test_vit": 1,
    "timm/resnetv2_18": 0,
    "timm/swiftformer_xs": 0,
    "timm/gmlp_ti16_224": 0,
    "transformers/clip": 0,
    "transformers/wav2vec2": 1,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_the_same_before_and_after(name):
    pytest.importorskip(name.split("/")[0], reason="the model is theirs")
    record = zoo_check.check(name, steps=True)
    assert "skipped" not in record, record
    assert not wrong(record) and record["step"] is True, record
    assert record["blocks"] >= SAMPLE[name], record


def test_the_record_has_no_wrong_result():
    record = json.loads(RECORD.read_text())
    assert [r for r in record["models"] if wrong(r)] == []
    compared = [r for r in record["models"] if r.get("forward") is True]
    assert len(compared) >= 0.6 * len(record["models"])
    assert all(r["skipped"] for r in record["models"] if r not in compared)
