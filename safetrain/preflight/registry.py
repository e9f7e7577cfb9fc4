"""Every check, in the order in which they run: cheap ones first, causes before their consequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import data, labels, loss, repeat, source, steps, trials, weights
from .outcome import Outcome
from .subject import Subject


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Subject], Outcome]
    looks_at: str
    fails: str
    """When it fails; empty if it never does."""
    warns: str
    """When it warns; empty if it never does."""
    fix: str


CHECKS = (
    Check(
        "readable",
        data.readable,
        "every sample can be read and put into a batch",
        "reading raises, there is no batch, or a batch holds no sample",
        "",
        "repair or leave out the samples named",
    ),
    Check(
        "data_finite",
        data.finite,
        "NaN and Inf in the data",
        "a field holds one",
        "",
        "fill it in where the data is read, or leave out the samples named",
    ),
    Check(
        "data_scale",
        data.scale,
        "outliers, and fields that are not standardised",
        "",
        "a sample is 1,000 times the typical one, or the typical value is above 10,000",
        "rescale, clip or leave out the sample named; standardise the field",
    ),
    Check(
        "constant_features",
        data.constant_features,
        "features that never change",
        "no field differs from sample to sample",
        "a column, a channel or a whole field is constant",
        "leave it out, or repair where it is read",
    ),
    Check(
        "labels",
        labels.labels,
        "labels against the classes of the output, indices against the embedding, shapes of targets against outputs",
        "one is out of range, there is only one class, or the shapes differ",
        "",
        "number classes from 0, give the model more outputs, pass `ignore_index`, or reshape the targets",
    ),
    Check(
        "padding",
        labels.padding,
        "an `ignore_index` or `padding_idx` that is also a real class or token",
        "a class is ignored, or the padding stands inside more than a tenth of the sequences",
        "the padding stands inside fewer sequences",
        "give padding a number of its own",
    ),
    Check(
        "empty_samples",
        data.empty_samples,
        "samples without content: no values, nothing but padding, all ignored",
        "one has no value, or its loss is not finite",
        "one has nothing to learn, or is all zeros",
        "leave out the samples named, or let the loss count them as 0",
    ),
    Check(
        "weights_finite",
        weights.finite,
        "initial weights that are NaN or Inf, or were never written to",
        "one is",
        "",
        "initialise the parameter named",
    ),
    Check(
        "weights_scale",
        weights.scale,
        "initial weights that are extreme or near zero",
        "100 times too large, all near zero, or zeros that get no gradient",
        "20 times too large, or one near zero",
        "initialise with a deviation of 1/sqrt(fan_in)",
    ),
    Check(
        "finite_steps",
        steps.finite_steps,
        "loss and gradients of batches from all over the data, the last one of the epoch included",
        "one is not finite, or the step raises; the first bad operation, its cause and its samples are named",
        "it was not finite only once",
        "the change at that line, tried on a replay",
    ),
    Check(
        "output_scale",
        steps.output_scale,
        "the output of each layer",
        "above 1e8, or not finite",
        "above 1e4",
        "standardise the inputs, scale the initialisation down, or normalise before the layer named",
    ),
    Check(
        "gradient_scale",
        steps.gradient_scale,
        "the gradient of each parameter",
        "all zero, vanishing 1e7-fold over the layers, or a norm above 1e8",
        "parameters that are not reached, zero in a matrix, vanishing 1e5-fold, or a norm above 1e4",
        "do not detach; use or freeze the parameters named; residual connections, normalisation, `guards.clip`",
    ),
    Check(
        "dead_units",
        steps.dead_units,
        "units of ReLU that never activate, and saturated tanh and sigmoid",
        "nine tenths of a layer are dead",
        "half of a layer is dead, or nine tenths of its values are saturated",
        "start biases at 0 and weights at `kaiming_uniform_`, or use LeakyReLU or GELU",
    ),
    Check(
        "amp_headroom",
        steps.amp_headroom,
        "the largest value and the smallest gradient against the range of float16",
        "`loop.precision` is fp16 and a value is above 65504, or nine tenths of the gradients are lost",
        "fp16 with a value above an eighth of that, or a tenth of the gradients lost",
        "standardise the inputs, `loop.precision=bf16`, or `guards.islands.modules`",
    ),
    Check(
        "initial_loss",
        loss.initial_loss,
        "the first loss against that of a model that has learned nothing: ln C, ln 2, or predicting 0",
        "5 times that (squared error: 100 times), or 1,000 times its own mean",
        "1.5 times, less than half, or 20 times its own mean",
        "small weights in the last layer, standardised targets, `reduction='mean'`",
    ),
    Check(
        "overfit_batch",
        trials.overfit_batch,
        "whether the model can overfit one batch",
        "the loss falls by less than 2%",
        "by less than 10%",
        "match inputs and targets, use the model's output in the loss, train the parameters that matter",
    ),
    Check(
        "learning_rate",
        trials.learning_rate,
        "the schedule, and short trainings at the learning rate and at smaller and larger ones",
        "it diverges where a smaller one does not, is zero or negative, or the schedule ends before the run",
        "it hardly changes anything where a larger one does",
        "the learning rate that worked: `optimizer.lr=…`",
    ),
    Check(
        "replay",
        repeat.replay,
        "whether the same step gives the same bits again",
        "loss or gradients differ by more than 1e-4",
        "they differ by less, or the data is not the same when it is read again",
        "draw random numbers from torch, NumPy or Python; `loop.deterministic=true`",
    ),
    Check(
        "resume",
        repeat.resume,
        "whether four steps, saved and resumed halfway, give the same bits as uninterrupted ones",
        "a tensor differs",
        "",
        "`register_buffer` for what a module counts or caches; data that repeats its order",
    ),
    Check(
        "lint",
        source.lint,
        "patterns in your code that may produce NaN later",
        "",
        "`safetrain lint` finds one",
        "the safe form of the line named",
    ),
)
