"""The configuration: schema, loading, checking, and the targets it names. Importing it never imports torch."""

from .load import LoadedConfig, load, load_config, to_write
from .merge import Override
from .render import to_yaml
from .schema import Config
from .sources import bundled_dir, recipe_names
from .targets import import_target, instantiate

__all__ = [
    "Config",
    "LoadedConfig",
    "Override",
    "bundled_dir",
    "import_target",
    "instantiate",
    "load",
    "load_config",
    "recipe_names",
    "to_write",
    "to_yaml",
]
