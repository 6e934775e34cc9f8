"""Scripts that are written for torch's own averages, and Lightning's callback."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader

from tailavg import AnytimeWindow, Exponential, Fixed
from tailavg.torch import AveragedModel, growing_avg_fn, growing_multi_avg_fn
from tests.support.torch_models import (
    History,
    Walk,
    assert_averages,
    bits,
    dense,
    named,
    only_tensors,
    saved,
    small,
    walked_module,
    wide,
)


@pytest.mark.parametrize("batch", ["tensor", "tuple"])
def test_torchs_update_bn_works(batch):
    random = torch.Generator().manual_seed(0)
    xs = [torch.rand(8, 3, generator=random) for _ in range(6)]
    loader = xs if batch == "tensor" else [(x, None) for x in xs]
    model = small()
    averaged, walk, history = walked_module(model, 10, 30)
    swa_utils.update_bn(loader, averaged)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for name, values in history.average(AnytimeWindow(10)).items():
            named(expected)[name].copy_(torch.from_numpy(values))
    swa_utils.update_bn(loader, expected)
    for (name, got), (_, want) in zip(
        averaged.module.named_buffers(), expected.named_buffers(), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
    assert averaged.module[1].momentum == 0.1
    statistics = bits(dict(averaged.module.named_buffers()))
    resumed = AveragedModel(small(seed=1), 10)
    resumed.load_state_dict(saved(averaged.state_dict()))
    assert bits(dict(resumed.module.named_buffers())) == statistics
    assert bits(resumed) == bits(averaged)
    walk.step()
    averaged.update_parameters(model)
    assert bits(dict(averaged.module.named_buffers())) == bits(dict(model.named_buffers()))


def test_the_script_of_torchs_documentation_with_one_argument_more():
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    loader = [(torch.rand(8, 3, generator=random), torch.rand(8, 2, generator=random))] * 3
    model, loss_fn = small(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa_model = AveragedModel(model, 0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    swa_scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
    history = History(model)
    for epoch in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        if epoch > 10:
            swa_model.update_parameters(model)
            history.record()
            swa_scheduler.step()
        else:
            scheduler.step()
    swa_utils.update_bn(loader, swa_model)
    assert swa_model.n_averaged == 19
    assert_averages(named(swa_model.module), history.average(AnytimeWindow(0.5)))
    swa_model.eval()
    assert loss_fn(swa_model(loader[0][0]), loader[0][1]) < 0.5


def test_a_window_of_everything_is_the_average_of_torchs_class():
    model = small()
    ours, theirs = AveragedModel(model, 1.0), swa_utils.AveragedModel(model)
    walk = Walk(model)
    for _ in range(100):
        walk.step()
        model(torch.rand(6, 3))
        ours.update_parameters(model)
        theirs.update_parameters(model)
    torch.testing.assert_close(
        only_tensors(ours.state_dict()), theirs.state_dict(), rtol=1e-5, atol=1e-5
    )


def test_the_averaged_model_goes_into_a_safetensors_file(tmp_path):
    model, file = small(), tmp_path / "averaged.safetensors"
    averaged, _, _ = walked_module(model, 10, 25)
    safetensors.torch.save_file(averaged.module.state_dict(), file)
    plain = small(seed=1)
    plain.load_state_dict(safetensors.torch.load_file(file))
    assert bits(plain) == bits(averaged.module)
    with pytest.raises(ValueError, match="_extra_state"):  # that is more than tensors
        safetensors.torch.save_file(averaged.state_dict(), file)


def test_tied_tensors_go_into_a_safetensors_file(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    averaged, _, _ = walked_module(Tied(), 10, 25)
    file = tmp_path / "averaged.safetensors"
    safetensors.torch.save_model(averaged.module, file)
    plain = Tied()
    safetensors.torch.load_model(plain, file)
    assert bits(plain) == bits(averaged.module)


# Functions for torch's own class


@pytest.mark.parametrize("window", [1, 10, 0.25, 1.0, Fixed(40)], ids=str)
@pytest.mark.parametrize("kind", ["multi", "single"])
def test_the_growing_exponential_drives_torchs_own_class(kind, window):
    model = small(norm=False).double()
    if kind == "multi":
        options = {"multi_avg_fn": growing_multi_avg_fn(window)}
    else:
        options = {"avg_fn": growing_avg_fn(window)}
    theirs, walk, history = swa_utils.AveragedModel(model, **options), Walk(model), History(model)
    for t in range(1, 151):
        walk.step()
        theirs.update_parameters(model)
        history.record()
        if t in (1, 2, 3, 10, 41, 150):
            expected = history.average(Exponential(window))
            for name, values in expected.items():
                np.testing.assert_allclose(
                    wide(named(theirs.module)[name]), values, rtol=1e-12, atol=1e-14, err_msg=name
                )


def test_the_functions_take_float32_and_buffers_that_are_integers():
    model = small()
    theirs = swa_utils.AveragedModel(
        model, multi_avg_fn=growing_multi_avg_fn(0.25), use_buffers=True
    )
    singly = swa_utils.AveragedModel(model, avg_fn=growing_avg_fn(0.25), use_buffers=True)
    history = History(model)
    for _ in range(30):
        model(torch.rand(6, 3))
        Walk(model, seed=_).step()
        theirs.update_parameters(model)
        singly.update_parameters(model)
        history.record()
    for one in (theirs, singly):
        assert_averages(named(one.module), history.average(Exponential(0.25)))
        assert one.module[1].num_batches_tracked.dtype == torch.int64


# Lightning's own callback


@pytest.fixture
def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        import lightning.pytorch
    return lightning.pytorch


def tail_averaging(rule):
    """The callback of docs/lightning.md."""
    from lightning.pytorch.callbacks import WeightAveraging

    class TailAveraging(WeightAveraging):
        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            if stage == "fit":
                self._average_model = AveragedModel(
                    pl_module, rule, pl_module.device, buffers="average"
                )

    return TailAveraging()


def growing_averaging(rule):
    from lightning.pytorch.callbacks import WeightAveraging

    return WeightAveraging(multi_avg_fn=growing_multi_avg_fn(rule.window))


def lightning_net(lightning, seed: int = 0):
    """A module that keeps its weights after each step and as validation sees them."""

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small(seed)
            self.steps, self.validated, self.last = [], {}, None

        def training_step(self, batch, index):
            assert self.last in (None, bits(self.net)), "on from the training weights"
            return self.net(batch).square().mean()

        def on_train_batch_end(self, outputs, batch, index):
            self.steps.append({name: wide(p) for name, p in self.named_parameters()})
            self.last = bits(self.net)

        def validation_step(self, batch, index):
            self.net(batch)
            seen = {name: wide(p) for name, p in self.named_parameters()}
            self.validated[self.trainer.global_step] = seen

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Net()


def fit(lightning, net, averaging, epochs: int, path=None, resume=None):
    """Train; save a checkpoint to `path` after the last epoch."""
    from lightning.pytorch.callbacks import Callback

    class Saver(Callback):
        def on_train_epoch_end(self, trainer, module):
            if path and trainer.current_epoch == epochs - 1:
                trainer.save_checkpoint(path)

    random = torch.Generator().manual_seed(0)
    batches = [torch.rand(6, 3, generator=random) for _ in range(7)]
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[averaging, Saver()],
    )
    loaders = (DataLoader(part, batch_size=None) for part in (batches, batches[:1]))
    trainer.fit(net, *loaders, ckpt_path=resume)
    return averaging._average_model


def average_of(steps, rule):
    alpha = dense(rule, [len(steps)])[len(steps)]
    return {name: np.tensordot(alpha, np.array([x[name] for x in steps]), 1) for name in steps[0]}


def assert_near(got, expected):
    assert got.keys() >= expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore")  # Lightning's own: workers of loaders, rich, checkpoints
@pytest.mark.parametrize(
    ("make", "rule", "more"),
    [
        (tail_averaging, AnytimeWindow(0.5), {"_extra_state"}),
        (growing_averaging, Exponential(0.5), set()),
    ],
    ids=["our class", "our function"],
)
def test_lightnings_callback_trains_validates_saves_and_resumes(
    lightning, tmp_path, make, rule, more
):
    whole = lightning_net(lightning)
    averaged = fit(lightning, whole, make(rule), epochs=4)
    assert len(whole.steps) == averaged.n_averaged == 28
    assert [step for step in whole.validated if step] == [7, 14, 21, 28]
    for step, seen in whole.validated.items():
        if step:  # before the first, a check that validation runs
            assert_near(seen, average_of(whole.steps[:step], rule))
    final = {name: wide(p) for name, p in whole.named_parameters()}
    assert_near(final, average_of(whole.steps, rule))

    path = tmp_path / "half.ckpt"
    half = lightning_net(lightning)
    fit(lightning, half, make(rule), epochs=2, path=path)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["averaging_state"]) == {"n_averaged"} | more
    assert checkpoint["averaging_state"]["n_averaged"] == 14
    kept = {name: wide(x) for name, x in checkpoint["state_dict"].items()}
    assert_near(kept, average_of(half.steps, rule))
    current = {name: wide(x) for name, x in checkpoint["current_model_state"].items()}
    for name, values in half.steps[-1].items():
        np.testing.assert_array_equal(current[name], values)

    resumed = lightning_net(lightning, seed=9)
    averaged = fit(lightning, resumed, make(rule), epochs=4, resume=path)
    assert (len(resumed.steps), averaged.n_averaged) == (14, 28)
    for name, values in whole.steps[-1].items():
        np.testing.assert_array_equal(resumed.steps[-1][name], values)
    assert bits(named(resumed)) == bits(named(whole))


def test_lightnings_callback_can_be_sent_to_other_processes(lightning):
    callback = growing_averaging(Exponential(0.25))
    for again in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert again._kwargs == callback._kwargs
