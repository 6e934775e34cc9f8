"""Torch's tools on models with tail BatchNorm: tracing, scripting, export, fusion."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.ao.quantization import fuse_modules
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tailavg import Growing
from tailavg.torch.batchnorm import convert_tail_batchnorm, revert_batchnorm
from tests.support.batchnorms import draw, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning"),
    # plain BatchNorm warns, too: it looks at the size of the batch
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
CAPPED = Growing(0.4, at_most=3)
windows = pytest.mark.parametrize("window", [0.25, 4, CAPPED], ids=str)
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])


def batches(steps=6, seed=0):
    return draw((5, 3, 4, 4), steps, seed=seed)


def conv_net(window=None):
    """A converted model that has seen a batch; a plain one without a window."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
        nn.BatchNorm1d(3),
    )
    if window is not None:
        convert_tail_batchnorm(model, window)
    model(batches(1, seed=7)[0])
    return model


def assert_alike(tool, model):
    """What a tool makes of a model goes on as the model does."""
    for x in batches():
        torch.testing.assert_close(tool(x), model(x))
        state = tool.state_dict()
        torch.testing.assert_close(
            dict(state), {name: each for name, each in model.state_dict().items() if name in state}
        )


@windows
@modes
def test_fx_keeps_it_as_one_call(window, training):
    model = conv_net(window).train(training)
    expected = copy.deepcopy(model)
    graph = fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == list("012345")
    assert graph.get_submodule("1") is model[1]
    assert_alike(graph, expected)
    assert_alike(graph.train(not training), expected.train(not training))


def test_fx_refuses_a_lone_one_as_it_does_a_plain_one():
    errors = []
    for norm in (nn.BatchNorm2d(3), convert_tail_batchnorm(nn.BatchNorm2d(3), 5)):
        with pytest.raises(fx.proxy.TraceError) as caught:
            fx.symbolic_trace(norm)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("window", "training", "momentum"),
    [(0.25, True, 0.1), (4, True, 0.1), (CAPPED, True, 0.1), (4, False, 0.1), (0.25, True, None)],
    ids=str,
)
def test_a_scripted_model_trains_and_evaluates(window, training, momentum):
    model = conv_net(window).train(training)
    for norm in (model[1], model[5]):
        norm.momentum = momentum
    expected = copy.deepcopy(model)
    scripted = torch.jit.script(model)
    assert_alike(scripted, expected)
    assert_alike(scripted.train(not training), expected.train(not training))
    norm, empty = getattr(scripted, "1").train(), torch.empty(0, 4, 2, 2)
    before = copy.deepcopy(norm.state_dict())
    assert norm(empty).shape == empty.shape
    assert same(norm.state_dict(), before)


@windows
def test_a_frozen_script_folds_it_into_the_layer_before(window):
    model = conv_net(window).eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    assert "aten::batch_norm" not in str(frozen.graph)
    torch.testing.assert_close(frozen(batches(1)[0]), model(batches(1)[0]), rtol=1e-4, atol=1e-5)


@windows
@modes
def test_a_traced_model_goes_on_in_its_mode(window, training):
    model = conv_net(window).train(training)
    expected = copy.deepcopy(model)
    x = batches(1)[0]
    traced = torch.jit.trace(model, x, check_trace=False)
    expected(x)
    assert_alike(traced, expected)


@pytest.mark.parametrize(
    ("window", "training", "strict"),
    [(0.25, True, False), (4, True, True), (CAPPED, True, False), (4, False, True)],
    ids=str,
)
def test_an_exported_model_goes_on_in_its_mode(window, training, strict):
    model = conv_net(window).train(training)
    expected = copy.deepcopy(model)
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(
        model, (batches(1)[0],), dynamic_shapes=[{0: size}], strict=strict
    )
    assert_alike(program.module(), expected)
    assert program.module()(torch.cat([*batches(2)])).shape == (10, 3)
    plain = torch.export.export(conv_net().train(training), (batches(1)[0],), strict=strict)
    assert program.state_dict.keys() == plain.state_dict.keys()


@windows
def test_it_fuses_in_eval(window):
    from torch.fx.experimental import optimization  # the import warns

    model = conv_net(window).eval()
    x = batches(1)[0]
    expected = model[:2](x)
    torch.testing.assert_close(fuse_conv_bn_eval(model[0], model[1])(x), expected)
    # these two know torch's own classes alone
    plain = revert_batchnorm(copy.deepcopy(model))
    fused = fuse_modules(plain[:3], ["0", "1", "2"])
    assert type(fused[1]) is nn.Identity
    torch.testing.assert_close(fused(x), expected.relu())
    fused = optimization.fuse(plain)
    assert not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in fused.modules())
    torch.testing.assert_close(fused(x), model(x))
    torch.testing.assert_close(optimization.fuse(model)(x), model(x))
