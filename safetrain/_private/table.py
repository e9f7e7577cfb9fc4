"""The table of all features that rely on undocumented behaviour. `safetrain env` prints this table."""

from __future__ import annotations

from ..core.spelling import suggest
from ..errors import UsageError
from .allocator import KEEP_MEMORY
from .autograd import TRACING
from .compiler import BACKWARD, ORIGINAL
from .dataloader import IN_THIS_PROCESS, OTHER_BATCH_SAMPLER, WAIT
from .ddp import BUFFERS, EXCHANGE
from .dtensor import PARTS
from .elastic import LAUNCHER
from .feature import WITHOUT, Feature, turned_off
from .foreach import FOREACH
from .fused import SKIP
from .graph import GRAPH_SHAPES
from .host import LISTENING
from .modules import BASE_CLASSES, SAVED_BUFFERS
from .parent import PARENT
from .storage import SPARSE_VALUES

FEATURES: tuple[Feature, ...] = (
    TRACING,
    GRAPH_SHAPES,
    FOREACH,
    SPARSE_VALUES,
    SKIP,
    BASE_CLASSES,
    SAVED_BUFFERS,
    ORIGINAL,
    BACKWARD,
    EXCHANGE,
    BUFFERS,
    PARTS,
    LAUNCHER,
    PARENT,
    IN_THIS_PROCESS,
    OTHER_BATCH_SAMPLER,
    WAIT,
    KEEP_MEMORY,
    LISTENING,
)


def check_names() -> None:
    """Raises if a name in the environment variable is none of a feature: misspelt, it would turn nothing off."""
    known = [feature.name for feature in FEATURES]
    for name in sorted(turned_off()):
        if name not in known:
            raise UsageError(
                f"{WITHOUT}: there is no feature {name!r}{suggest(name, known)}\nTo fix: use names that safetrain env prints."
            )
