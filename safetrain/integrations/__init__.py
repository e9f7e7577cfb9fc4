"""Guards in the loops of other frameworks, built on `safetrain.watch`. Each framework is imported only by its own module."""
