"""What `fit` trains is averaged, on either backend, and training is as if it were not."""

import keras
import numpy as np
import pytest

from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    ExactWindow,
    Exponential,
    Freshest,
    TailAverage,
)
from tailavg.core.clock import SUM, clock_for
from tailavg.core.rules import as_rule
from tailavg.keras import TailAveraging
from tests.support.any_tails import Tails
from tests.support.cases import of_rules
from tests.support.keras_training import (
    BATCHES,
    At,
    Record,
    StopError,
    X,
    Y,
    assert_close,
    combined,
    equal,
    fit,
    held,
    model,
    stop,
    walk,
    weights,
)
from tests.support.model import weight_matrix

JAX = keras.backend.backend() == "jax"
STEPS = 600  # a fold comes after 256


@of_rules([AnytimeWindow(0.25), AnytimeWindow(400, 4), Exponential(0.3), Exponential(50)])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_weights_are_those_of_the_paper(rule, offload):
    tail = TailAveraging(rule, offload=offload)
    samples, got = walk(tail, STEPS)
    alpha = weight_matrix(rule, STEPS)[-1]
    np.testing.assert_allclose(tail.weights(), alpha, atol=1e-12)
    assert tail.count == tail.profile().count == STEPS
    assert_close([got], combined(alpha, samples[:, None]))


def test_any_tail_is_read_with_a_window_and_with_a_decay():
    rule, model_ = AnyTail(8, 0.2), Tails(AnyTail(8, 0.2))
    for _ in range(STEPS):
        model_.add()
    tail = TailAveraging(rule, 0.3)
    samples, got = walk(tail, STEPS)
    np.testing.assert_allclose(tail.weights(), model_.of(0.3), atol=1e-12)
    assert_close([got], combined(model_.of(0.3), samples[:, None]))
    assert tail.size == 180

    with tail.average_parameters(0.7):
        assert_close(weights(tail.model), combined(model_.of(0.7), samples[:, None]))
    assert equal(weights(tail.model), [got])

    numpy = TailAverage(rule)
    numpy.update_many(samples.astype(float))
    for reading in (Decay(0.5, "cosine"), Freshest(0.5)):
        by_age = TailAveraging(rule, reading)
        _, got = walk(by_age, STEPS)
        assert_close([got], [numpy.value(reading)])
        np.testing.assert_allclose(by_age.weights(), numpy.weights(reading), atol=1e-12)


@of_rules([AnytimeWindow(0.25), AnytimeWindow(10), Exponential(50)])
def test_an_average_is_the_sum_of_the_clocks_terms_to_the_bit(rule):
    """A state has what was summed; the terms are those of the same rule in NumPy."""
    tail = TailAveraging(rule)
    _, got = walk(tail, 300)
    state = tail._average.state()
    clock = clock_for(rule)
    clock.restore(state["count"], state["starts"], state["folded"])
    empty, value = len(clock.blocks) - len(state["starts"]), np.float32(0)
    for weight, block in clock.terms():
        part = state["partial"] if block == SUM else state["blocks"][block - empty]
        value = value + np.float32(weight) * part["0"]
    assert got.tobytes() == np.asarray(value, np.float32).tobytes()


def test_nothing_depends_on_offload():
    for rule, window in ((AnytimeWindow(0.25), None), (AnyTail(6), 0.4)):
        plain, offloaded = TailAveraging(rule, window), TailAveraging(rule, window, offload="cpu")
        assert equal([walk(plain, 400)[1]], [walk(offloaded, 400)[1]])


@pytest.mark.parametrize("rule", [0.25, 10, Exponential(0.5)])
def test_validation_and_the_model_after_fit_have_the_averages(rule):
    plain, recorded = model(), Record()
    fit(plain, recorded)
    made, tail, seen = model(), TailAveraging(rule), Record()
    history = fit(made, tail, seen)
    # training is the same to the bit, and each epoch begins where the last one ended
    assert all(map(equal, seen.batches, recorded.batches))
    assert all(map(equal, seen.begun[1:], recorded.epochs))
    assert all(map(equal, seen.epochs, recorded.epochs))  # validation gave the weights back
    assert tail.count == 3 * BATCHES

    rows = weight_matrix(as_rule(rule), tail.count)
    for epoch in range(3):
        steps = (epoch + 1) * BATCHES
        expected = combined(rows[steps - 1], recorded.batches)
        for test in seen.tests[2 * epoch : 2 * epoch + 2]:  # two batches
            assert_close(test, expected)
    assert equal(weights(made), seen.tests[-1])
    loss = made.evaluate(X[:8], Y[:8], batch_size=4, verbose=0)
    assert loss == pytest.approx(history.history["val_loss"][-1], abs=1e-6)
    assert not {"evaluate", "save", "save_weights"} & set(vars(made))

    tail.restore()
    assert equal(weights(made), recorded.batches[-1])
    tail.restore()  # nothing left to do
    with tail.average_parameters():
        assert equal(weights(made), seen.tests[-1])
    with pytest.raises(StopError), tail.average_parameters():
        stop()
    assert equal(weights(made), recorded.batches[-1])


def test_accumulated_batches_are_not_samples():
    made = model(optimizer=keras.optimizers.SGD(0.03, gradient_accumulation_steps=4))
    tail, seen = TailAveraging(3), Record()
    fit(made, tail, seen, epochs=1)
    assert (len(seen.batches), tail.count) == (16, 4)
    alpha = weight_matrix(AnytimeWindow(3), 4)[-1]
    assert_close(weights(made), combined(alpha, seen.batches[3::4]))


def test_skipped_steps_are_not_samples():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.03))
    made, tail, x = model(optimizer=optimizer), TailAveraging(1.0), X.copy()
    x[4:8] = np.nan
    made.fit(x, Y, batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[tail])
    assert tail.count == BATCHES - 1
    assert all(np.isfinite(array).all() for array in weights(made))


@pytest.mark.skipif(not JAX, reason="torch has no steps_per_execution")
def test_steps_that_are_executed_together_are_one_sample():
    plain, recorded = model(), Record()
    fit(plain, recorded, epochs=1)
    made, tail = model(steps_per_execution=4), TailAveraging(0.5)
    fit(made, tail, epochs=1)
    assert tail.count == 4
    alpha = weight_matrix(AnytimeWindow(0.5), 4)[-1]
    assert_close(weights(made), combined(alpha, recorded.batches[3::4]), atol=1e-5)


@pytest.mark.parametrize("averaged", [False, True])
def test_moving_statistics(averaged):
    plain, recorded = model(norm=True), Record()
    fit(plain, recorded, epochs=2)
    made, tail = model(norm=True), TailAveraging(0.5, moving_statistics=averaged)
    fit(made, tail, epochs=2)
    alpha = weight_matrix(AnytimeWindow(0.5), 2 * BATCHES)[-1]
    assert_close(weights(made), combined(alpha, recorded.batches))
    found = held(made.non_trainable_variables)
    if averaged:
        assert_close(found, combined(alpha, recorded.statistics))
    else:
        assert equal(found, recorded.statistics[-1])


def test_half_precision():
    keras.config.set_dtype_policy("bfloat16")
    try:
        made, tail, seen = model(), TailAveraging(0.5), Record()
    finally:
        keras.config.set_dtype_policy("float32")
    fit(made, tail, seen, epochs=2)
    alpha = weight_matrix(AnytimeWindow(0.5), 2 * BATCHES)[-1]
    for got, expected in zip(weights(made), combined(alpha, seen.batches), strict=True):
        np.testing.assert_allclose(got.astype(float), expected, rtol=2**-8)
    tail.restore()
    assert equal(weights(made), seen.batches[-1])


def test_without_a_sample_nothing_is_swapped():
    made = model(optimizer=keras.optimizers.SGD(0.03, gradient_accumulation_steps=100))
    first, tail, seen = weights(made), TailAveraging(0.5, swap_on_epoch=True), Record()
    fit(made, tail, seen, epochs=1)
    assert all(equal(first, other) for other in (*seen.tests, *seen.epochs, weights(made)))
    assert tail.count == 0
    for call in (tail.weights, tail.profile, lambda: tail.average_parameters().__enter__()):
        with pytest.raises(ValueError, match=r"at least one sample .* give this callback to fit"):
            call()


@pytest.mark.parametrize("event", ["test begin", "test batch"])
def test_whatever_validation_raises_the_training_weights_are_back(event):
    made, tail, seen = model(norm=True), TailAveraging(0.5), Record()
    with pytest.raises(StopError):
        fit(made, tail, seen, At(event, 1, stop))
    assert equal(weights(made), seen.batches[-1])
    statistics = held(made.non_trainable_variables)
    assert all(np.isfinite(array).all() for array in statistics)
    fit(made, tail, epochs=1)  # and it goes on
    assert tail.count == 3 * BATCHES


def test_validation_data_that_cannot_be_used():
    made, tail, seen = model(), TailAveraging(0.5), Record()
    with pytest.raises(Exception, match=r"3|shape"):
        fit(made, tail, seen, validation_data=(X[:8, :2], Y[:8]))
    assert equal(weights(made), seen.batches[-1])


def test_a_second_fit_goes_on_from_the_training_weights():
    once, twice, tails = model(), model(), [TailAveraging(0.25), TailAveraging(0.25)]
    fit(once, tails[0], epochs=4)
    fit(twice, tails[1], epochs=2)
    fit(twice, tails[1], epochs=4, initial_epoch=2)
    assert tails[0].count == tails[1].count == 4 * BATCHES
    assert equal(weights(once), weights(twice))

    changed = [array + 1 for array in weights(twice)]
    twice.set_weights(changed)
    seen = Record()
    fit(twice, tails[1], seen, epochs=1)
    assert equal(seen.begun[0], changed)


def test_one_average_for_one_run():
    tail, made = TailAveraging(0.5), model()
    fit(made, tail, epochs=1)
    with pytest.raises(
        RuntimeError, match="at iteration 16 of its optimizer, but the optimizer is at 0"
    ):
        fit(model(), tail, epochs=1)
    with pytest.raises(ValueError, match="expected one TailAveraging, got two"):
        fit(model(), TailAveraging(0.5), TailAveraging(0.25))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((AnyTail(),), ValueError, "AnyTail has no window of its own"),
        ((AnyTail(), 1000), ValueError, "window: 1000 is too short for .* in a long run"),
        ((0.5, 0.25), ValueError, "has its own window"),
        ((ExactWindow(5),), TypeError, "use AnytimeWindow, which has the same variance"),
        (("last",), TypeError, "expected"),
        (("10min",), TypeError, "a window of time works in TailAverage"),
    ],
)
def test_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        TailAveraging(*arguments)


def test_more_arguments():
    with pytest.raises(ValueError, match="offload: expected 'cpu'"):
        TailAveraging(0.5, offload="disk")
    made = model()
    for layer in made.layers:
        layer.trainable = False
    made.compile("sgd", "mse")
    with pytest.raises(ValueError, match="expected variables to train, got none"):
        fit(made, TailAveraging(0.5), epochs=1)
