"""Which classes and functions of torch and safetrain a foreign config may name: none that reads files or calls its
arguments.

Never data sets, data loaders and data pipes, `torch.load`, `torch.hub` or `torch.jit`: they open files, and files hold code.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_LAYERS = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout AvgPool1d
AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ChannelShuffle CircularPad1d CircularPad2d CircularPad3d
ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineSimilarity
CrossMapLRN2d Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d
FractionalMaxPool3d GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh Identity InstanceNorm1d InstanceNorm2d
InstanceNorm3d LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d
LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d
LazyLinear LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d
Mish ModuleDict ModuleList MultiheadAttention PReLU PairwiseDistance PixelShuffle PixelUnshuffle RMSNorm RNN RNNCell RReLU ReLU ReLU6
ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU Sigmoid Softmax
Softmax2d Softmin Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoder
TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d
ZeroPad1d ZeroPad2d ZeroPad3d
"""
_LOSSES = """
AdaptiveLogSoftmaxWithLoss BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss HingeEmbeddingLoss
HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss
PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss
"""
_LOSS_FUNCTIONS = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_OPTIMIZERS = """
ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam
"""
_SCHEDULES = """
ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR MultiStepLR OneCycleLR
PolynomialLR ReduceLROnPlateau SequentialLR StepLR
"""
_SAFE = """
acos asin atanh bce cosine_similarity div exp log log_softmax masked_mean norm normalize pow softmax sqrt std
"""
_OWN = {"safetrain.SafeTrainer", "safetrain.trainer.trainer.SafeTrainer"} | {
    f"{module}.{name}" for module in ("safetrain.optimizers", "safetrain.optim.optimizers") for name in ("adamw", "sgd")
}

NAMES = frozenset(
    f"{module}.{name}"
    for module, names in {
        "torch.nn": _LAYERS + _LOSSES,
        "torch.nn.functional": _LOSS_FUNCTIONS,
        "torch.optim": _OPTIMIZERS,
        "torch.optim.lr_scheduler": _SCHEDULES,
        "safetrain.safe": _SAFE,
    }.items()
    for name in names.split()
) | frozenset(_OWN)


def is_harmless(found: Any) -> bool:
    """Is it one of them, by whatever name it was found?"""
    return any(found is one for one in _objects())


@functools.cache
def _objects() -> tuple[Any, ...]:
    from ..config import import_target

    made = []
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("torch.") or hasattr(sys.modules.get(module), attribute):  # a newer or an older torch
            made.append(import_target(name))
    return tuple(made)
