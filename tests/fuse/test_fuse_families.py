"""fuse_ on blocks of real models: the same outputs and gradients, as many blocks as there are."""

import copy
import pickle

import pytest
import torch
from fused_models import assert_contract_in, assert_fuses, cast, results
from helpers import one_thread  # noqa: F401
from model_families import FAMILIES, SMALL, TOKENS, decoder, encoder, hugging_face
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl

family_param = pytest.mark.parametrize("family", FAMILIES)


@family_param
def test_outputs_and_all_gradients_are_the_models_own(family):
    assert_fuses(*FAMILIES[family])


@pytest.mark.parametrize("family", ["BERT", "GPT-2", "OPT", "timm Mlp", "encoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_in_narrow_types_are_not_above_eagers(family, dtype):
    assert_contract_in(dtype, *FAMILIES[family][:2])


@family_param
def test_copies_and_files_hold_the_fused_model(family):
    make, inputs, blocks, _ = FAMILIES[family]
    model = make().double()
    eager = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == blocks
    inputs = cast(inputs, torch.float64)
    want = results(eager, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(other) == repr(model)
        del model  # a copy stands alone
        assert_same(results(other, inputs), want)
        tfl.unfuse_(other)
        assert repr(other) == repr(eager)
        assert_same(results(other, inputs), want)
        model = other
        tfl.fuse_(model)


NAMES = [
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "gelu_accurate",
    "gelu_python",
    "relu",
]


@pytest.mark.parametrize("name", [*NAMES, "relu", "silu"])
def test_the_kind_of_gelu_is_kept(name):
    make = hugging_face("PhiModel", "PhiConfig", **SMALL, hidden_act=name)
    model = assert_fuses(make, TOKENS, 2, 2)
    block = tfl.fuse_(tfl.unfuse_(model) or model).fused[0]
    kind = {"relu": "linear_relu", "silu": "linear_silu"}
    kind |= dict.fromkeys(("gelu", "gelu_python"), "linear_gelu (erf)")
    assert block.after[0] == kind.get(name, "linear_gelu (tanh)")


@pytest.mark.parametrize("name", ["quick_gelu", "gelu_10", "mish", "relu2", "relu6", "tanh"])
def test_other_activations_are_refused_by_name(name):
    model = hugging_face("PhiModel", "PhiConfig", **SMALL, hidden_act=name)()
    text = repr(model)
    report = tfl.fuse_(model)
    assert not report.fused and repr(model) == text
    assert [s.path for s in report.skipped] == ["layers.0.mlp.fc1", "layers.1.mlp.fc1"]
    activation = type(model.layers[0].mlp.activation_fn).__name__
    assert all(activation in s.reason for s in report.skipped)


def test_gradient_checkpointing_still_works():
    make, inputs, blocks, _ = FAMILIES["BERT"]
    model = make().double()
    want = results(model, inputs)
    model.gradient_checkpointing_enable()
    assert len(tfl.fuse_(model).fused) == blocks
    with tfl.explain() as calls:
        assert_same(results(model, inputs), want)
    assert calls.handed_over == 2, calls


def test_transformers_can_initialise_and_save_a_fused_model(tmp_path):
    make, inputs, _, _ = FAMILIES["GPT-2"]
    model = make()
    tfl.fuse_(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_same([results(again, inputs)[0]], [results(model, inputs)[0]])
    old = model.transformer.h[0].mlp.c_fc.weight.clone()
    # a layer that is initialised is marked, and the mark must have gone with the layer
    for module in model.modules():
        module._is_hf_initialized = False
    model.apply(model._init_weights)
    assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, old)


def test_a_decoder_layer_with_an_activation_module_is_copied_as_torch_copies_it():
    """Its __setstate__ puts F.relu over the module: the copy is another function in torch too."""
    layer, x = decoder(activation=nn.GELU())(), torch.randn(2, 5, 8)
    plain = copy.deepcopy(layer)
    want = layer(x, x)
    assert len(tfl.fuse_(layer).fused) == 1
    torch.testing.assert_close(layer(x, x), want)
    torch.testing.assert_close(copy.deepcopy(layer)(x, x), plain(x, x))


def test_a_stack_of_encoder_layers_keeps_its_fast_path():
    layer = encoder()()
    tfl.fuse_(layer)
    stack = nn.TransformerEncoder(layer, 2).double().eval()
    plain = copy.deepcopy(stack)
    tfl.unfuse_(plain)
    x, mask = torch.randn(2, 5, 8).double(), torch.arange(5).expand(2, 5) > 3
    with torch.no_grad(), tfl.explain() as calls:
        got = stack(x, src_key_padding_mask=mask)
    assert not calls.calls, "torch's own kernel ran"
    with torch.no_grad():
        assert torch.equal(got, plain(x, src_key_padding_mask=mask))
