"""An incident on disk: its bundle, the codec of its batch, its texts, and the replay of its step."""
