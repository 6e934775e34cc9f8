"""Train on scikit-learn's digits with Lightning and `TailAveraging`.

    python examples/lightning_digits.py [--epochs 20] [--quick]

The learning rate is constant, so the last weights are noisy. Validation, the best checkpoint and
the module at the end have the averages; the training weights are in the checkpoint, beside them.
From an `AnyTail`, the window is chosen after the run, on the validation images.
"""

import argparse
import logging
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tailavg import AnyTail
from tailavg.lightning import TailAveraging

torch.set_num_threads(1)  # a network this small gains nothing from more
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # of loaders without workers


class Classifier(LightningModule):
    """A small network; nothing in it knows of averages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """The same on images that it does not train on."""
        self.log("loss", self.training_step(batch, index))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A rate that never falls."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.003)


def main() -> None:
    """Train, and print the test loss of the training weights and of three averages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="4 epochs")
    options = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    )
    training, validation, test = torch.utils.data.random_split(data, (1000, 300, 497))
    held_out = DataLoader(validation, batch_size=300)
    tested = DataLoader(test, batch_size=497)

    module = Classifier()
    averaging = TailAveraging(AnyTail(), window=0.25)  # the last quarter of the steps so far
    with tempfile.TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, monitor="loss", save_last=True)
        trainer = Trainer(
            max_epochs=4 if options.quick else options.epochs,
            callbacks=[averaging, keep],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(training, batch_size=8, shuffle=True), held_out)

        def loss(weights: str = "") -> float:
            (found,) = trainer.test(module, tested, ckpt_path=weights or None, verbose=False)
            return found["loss"]

        def evaluate() -> float:  # for the choice of a window
            (found,) = trainer.validate(module, held_out, verbose=False)
            return found["loss"]

        results = {"the last quarter": loss()}  # now the module has the averages
        found = averaging.average.select_tail(evaluate)
        averaging.average.copy_to(window=found.window)
        results[f"the last {found.window:g}, selected"] = loss()
        results["the best checkpoint"] = loss("best")
        checkpoint = torch.load(keep.last_model_path, weights_only=True)
        module.load_state_dict(checkpoint["current_model_state"])
        results["training weights"] = loss()

    print(f"{averaging.average.count} steps; test loss of")
    for name, result in results.items():
        print(f"{name:28}{result:.4f}")


if __name__ == "__main__":
    main()
